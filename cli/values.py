"""The value of a setting: it is read from text, never executed, and checked against the type in its dataclass."""

import ast
import difflib
import math
import operator
import types
import typing
from typing import Literal

from cli.errors import ConfigError


def types_of(cls):
    """Return {name: type} of the fields of a dataclass."""
    return {name: kind for name, kind in typing.get_type_hints(cls).items() if name in cls.__dataclass_fields__}


ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.USub: operator.neg, ast.UAdd: operator.pos}  # fmt: skip


def evaluate(node):
    """Evaluate a literal, which may have + - * / // and ** on numbers. These are bounded, so no line can hang."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in ARITHMETIC:
        value = ARITHMETIC[type(node.op)](number(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        value = ARITHMETIC[type(node.op)](number(node.left), number(node.right))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = number(node.left), number(node.right)
        if abs(exponent) > 64:
            raise ValueError("too large a power")
        value = base**exponent
    else:
        raise ValueError("not a literal")
    if isinstance(value, int):
        float(value)  # OverflowError above 1e308
    return value


def number(node):
    value = evaluate(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("arithmetic is for numbers")
    return value


def literal_or_text(text, kind):
    """Return the value of a flag: the literal that the text is, or the text itself if the setting is a string."""
    if kind is str or str in typing.get_args(kind):
        return None if kind is not str and text == "None" else text
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return text


def convert(name, value, kind, where):
    """Return a value as type `kind`, or raise ConfigError. An int becomes a float, and a float like 1e5 an int."""
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for choice in choices:
        if typing.get_origin(choice) is Literal and value in typing.get_args(choice):
            return value
        if type(value) is choice and not (choice is float and not math.isfinite(value)):
            return value
    if float in choices and type(value) is int:
        return float(value)
    if int in choices and type(value) is float and value.is_integer():
        return int(value)
    raise ConfigError(f"{where}: {name} expects {describe(choices)}, got {value!r}")


def describe(choices):
    words = []
    for choice in choices:
        if typing.get_origin(choice) is Literal:
            words += [repr(value) for value in typing.get_args(choice)]
        else:
            words += {
                bool: ["True", "False"],
                int: ["an integer"],
                float: ["a number"],
                str: ["a string"],
                type(None): ["None"],
            }[choice]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def nearest(name, known):
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all settings"
