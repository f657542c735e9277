"""Config files: lines of `name = literal` in Python syntax, with arithmetic on numbers. They are never executed."""

import ast
from pathlib import Path

from cli.errors import ConfigError
from cli.values import convert, evaluate, nearest, types_of


def read_settings(path, config_class):
    """Return the settings of a config file as a dict. The dataclass config_class declares their names and types."""
    known = types_of(config_class)
    settings = {}
    for line in parse(path).body:
        where = f"{path}:{line.lineno}"
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            continue  # the docstring
        if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
            raise ConfigError(f"{where}: only `name = literal` lines are allowed; a config is read, never executed")
        name = line.targets[0].id
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}{nearest(name, known)}")
        try:
            value = evaluate(line.value)
        except (ValueError, ArithmeticError, RecursionError):
            raise ConfigError(
                f"{where}: the value of {name} is not a literal; a config is read, never executed"
            ) from None
        settings[name] = convert(name, value, known[name], where)
    return settings


def parse(path):
    """Return the syntax tree of a config file."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8-sig"), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; configs/ holds examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two come from deep nesting
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        raise ConfigError(f"{where}: not Python syntax; a config consists of `name = value` lines") from None
