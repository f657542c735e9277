"""Values: what is a literal, what becomes of it by the type that a setting declares, what is refused and how."""

import time

import pytest

from cli.config_file import read_settings
from config import Config
from tests.cli.commands import given, refused


@pytest.mark.parametrize(
    "flag, value",
    [
        ("n_layer=4", 4), ("max_iters=1e5", 100000), ("max_iters=6.0", 6), ("max_iters=5*8", 40),
        ("learning_rate=1", 1.0), ("learning_rate=1e-3", 1e-3), ("learning_rate=2**-10", 2**-10), ("dropout=0", 0.0),
        ("bias=True", True), ("compile=False", False), ("compile=auto", "auto"), ("dtype=auto", "auto"),
        ("dtype=float16", "float16"), ("dtype='float16'", "float16"), ("norm=rmsnorm", "rmsnorm"),
        ("n_kv_head=None", None), ("n_kv_head=2", 2), ("vocab_size=5e1", 50), ("grad_clip=None", None),
        ("grad_clip=0", 0.0), ("eval_iters=None", None), ("device=cuda:1", "cuda:1"),
    ],
)  # fmt: skip
def test_every_kind_of_value(flag, value, written):
    """From a flag and from a file alike, type included."""
    name, _, text = flag.partition("=")
    found = getattr(given([f"--{flag}"])[0], name)
    assert found == value and type(found) is type(value)
    in_file = repr(value) if isinstance(value, str) else text
    read = read_settings(written(f"{name} = {in_file}"), Config)[name]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("n_layer", "1.5", "an integer"), ("n_layer", "True", "an integer"), ("n_layer", "None", "an integer"),
        ("n_layer", "'four'", "an integer"), ("n_layer", "1e400", "an integer"),
        ("learning_rate", "'fast'", "a number"), ("learning_rate", "False", "a number"),
        ("learning_rate", "1e400", "a number"), ("learning_rate", "-1e308*10", "a number"),
        ("learning_rate", "None", "a number"),
        ("bias", "1", "True or False"), ("bias", "0", "True or False"), ("bias", "'true'", "True or False"),
        ("bias", "1.0", "True or False"), ("bias", "None", "True or False"),
        ("compile", "1", "'auto', True or False"), ("compile", "'always'", "'auto', True or False"),
        ("dtype", "'fp8'", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("dtype", "16", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("model", "'rnn'", "'transformer' or 'mlp'"), ("activation", "None", "'gelu', 'relu2' or 'swiglu'"),
        ("n_kv_head", "0.5", "an integer or None"), ("n_kv_head", "'none'", "an integer or None"),
        ("n_kv_head", "False", "an integer or None"), ("grad_clip", "'off'", "a number or None"),
    ],
)  # fmt: skip
def test_wrong_types_say_what_was_expected(name, text, expected, written):
    value = eval(text)
    path = written(f"\n{name} = {text}")
    assert refused([path]) == f"{path}:2: {name} expects {expected}, got {value!r}"
    flag = text.strip("'")
    assert refused([f"--{name}={flag}"]) == f"--{name}={flag}: {name} expects {expected}, got {value!r}"


@pytest.mark.parametrize(
    "value",
    [
        "10**10**10", "(10**10)**64", "2**-(10**10)", "(2**64)**64", "*".join(["10**64"] * 90), "1" + "0" * 400,
        "9" * 5000, "1" + "+1" * 50000, "-" * 100000 + "1", "(" * 5000 + "1" + ")" * 5000,
    ],
    ids=["tower", "power", "root", "square", "product", "long", "longer", "sum", "minus", "brackets"],
)  # fmt: skip
def test_a_hostile_number_is_refused_at_once(value, written):
    """A config may come from a stranger: no line of it can hang, overflow or run out of stack."""
    for setting in ("n_layer", "learning_rate", "out_dir"):
        start = time.perf_counter()
        path = written(f"{setting} = {value}")
        assert refused([path]).startswith(path)
        if setting != "out_dir":
            assert f"{setting} expects a" in refused([f"--{setting}={value}"])
        assert time.perf_counter() - start < 2
