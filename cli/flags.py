"""Command lines: config files and `--name=value` flags. Defaults come first, then files left to right, then flags."""

import inspect
import os
import re

from cli.config_file import read_settings
from cli.errors import require
from cli.values import convert, literal_or_text, nearest, types_of


def load(argv, config_class, options, usage):
    """Return (config, options) from a command line of config files and flags.

    `options` is the dataclass of the command's other flags, and `usage` is how the command is typed.
    """
    files, flags = parse(argv, (config_class, options), usage)
    settings = {}
    for file in files:
        settings |= read_settings(file, config_class)
    settings |= {name: value for name, value in flags.items() if name in config_class.__dataclass_fields__}
    other = {name: value for name, value in flags.items() if name in options.__dataclass_fields__}
    return config_class(**settings), options(**other)


def parse(argv, classes, usage):
    """Return (positional words, {name: value}) of a command line. The dataclasses declare its flags.

    The last class declares the options of the command. The classes before it declare settings, which may also be in
    config files. Both --name=value and --name value are read. Two kinds of options need no value: a bool, and one whose
    metadata has a value for this case under "bare". For --help, the help text is printed and the program exits.
    """
    kinds = {name: kind for cls in classes for name, kind in types_of(cls).items()}
    bare_values = {name: True for name, kind in types_of(classes[-1]).items() if kind is bool}
    bare_values |= {
        name: field.metadata["bare"]
        for name, field in classes[-1].__dataclass_fields__.items()
        if "bare" in field.metadata
    }
    words, flags, rest = [], {}, list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            print(help_text(classes, usage))
            raise SystemExit(0)
        if not word.startswith("--"):
            is_positional = not word.startswith("-") and ("=" not in word or os.path.exists(word))
            require(is_positional, f"argument {word!r}: write --{word.lstrip('-')}")
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        require(name in kinds, f"unknown setting --{name}{nearest(name, kinds)}")
        bare = bare_values.get(name)
        if not equals and (bare is True or (bare is not None and not (rest and is_value(rest[0])))):
            flags[name] = bare
            continue
        if not equals:
            require(rest and not rest[0].startswith("--"), f"--{name} needs a value: --{name}=VALUE")
            text = rest.pop(0)
        flags[name] = convert(name, literal_or_text(text, kinds[name]), kinds[name], f"--{name}={text}")
    return words, flags


def is_value(word):
    """Return whether the word after a flag is its value; otherwise it is the next flag, or a config file."""
    return not word.startswith("--") and not word.endswith(".py")


DECLARATION = re.compile(r"    (\w+): (.+?) = (.+?)(?:  # (.*))?$|    # --- (.*)$")


def help_text(classes, usage):
    """Return the usage, the options of the command, and all settings with their comments in the source code."""
    text = f"usage: {usage} [--name=value ...]\n\n{inspect.cleandoc(classes[-1].__doc__)}"
    for cls in (cls for cls in reversed(classes) if cls.__dataclass_fields__):
        text += "\n\n" + ("Options of this command:" if cls is classes[-1] else "Settings, also for config files:")
        for base in reversed(cls.__mro__[:-1]):
            for line in filter(None, map(DECLARATION.match, inspect.getsource(base).splitlines())):
                name, kind, default, comment, section = line.groups()
                if section:
                    text += f"\n  {section}"
                    continue
                default = re.sub(r"field\(default=(\w+),.*\)", r"\1", default)
                choices = " | ".join(re.findall(r'"(\w+)"', kind)) or ("True | False" if kind == "bool" else "")
                notes = "; ".join(filter(None, (comment, choices if choices not in (comment or "") else "")))
                text += f"\n    {f'--{name}={default}':<36}{notes}".rstrip()
    return text
