"""Config files: Python syntax that is read and never run, whoever wrote it."""

import pytest

from cli.config_file import read_settings
from config import Config
from tests.cli.commands import refused


def test_arithmetic_and_a_docstring(written):
    path = written(
        '"""A run\nof two lines."""\n'
        "gradient_accumulation_steps = 5 * 8\n"
        "max_iters = 10 ** 6 // 2 - 3 + +1  # a comment\n"
        "learning_rate = -(3 / 2) ** 2\n"
        "vocab_size = 2**16\n"
        "out_dir = 'out' '-one'; bias = True\n"
        "n_layer = 1\n"
        "n_layer = 2\n"
    )
    assert read_settings(path, Config) == {
        "gradient_accumulation_steps": 40, "max_iters": 499998, "learning_rate": -2.25, "vocab_size": 65536,
        "out_dir": "out-one", "bias": True, "n_layer": 2,
    }  # fmt: skip


def test_a_file_with_a_byte_order_mark(written):
    assert read_settings(written(b"\xef\xbb\xbfn_layer = 4\n"), Config) == {"n_layer": 4}


@pytest.mark.parametrize(
    "line, reason",
    [
        ("import os", "only `name = literal` lines are allowed"),
        ("print('hello')", "only `name = literal` lines are allowed"),
        ("n_layer += 1", "only `name = literal` lines are allowed"),
        ("n_layer, n_head = 4, 4", "only `name = literal` lines are allowed"),
        ("n_layer = n_head = 4", "only `name = literal` lines are allowed"),
        ("n_layer: int = 4", "only `name = literal` lines are allowed"),
        ("os.environ = 4", "only `name = literal` lines are allowed"),
        ("n_layer[0] = 4", "only `name = literal` lines are allowed"),
        ("if True: n_layer = 4", "only `name = literal` lines are allowed"),
        ("def n_layer(): pass", "only `name = literal` lines are allowed"),
        ("4", "only `name = literal` lines are allowed"),
        ("out_dir = str(4)", "the value of out_dir is not a literal"),
        ("out_dir = f'out-{4}'", "the value of out_dir is not a literal"),
        ("out_dir = b'out'", "the value of out_dir is not a literal"),
        ("out_dir = 'out' + '-one'", "the value of out_dir is not a literal"),
        ("out_dir = 'out' * 3", "the value of out_dir is not a literal"),
        ("n_layer = n_head", "the value of n_layer is not a literal"),
        ("n_layer = math.pi", "the value of n_layer is not a literal"),
        ("n_layer = [4]", "the value of n_layer is not a literal"),
        ("n_layer = 1 if True else 2", "the value of n_layer is not a literal"),
        ("n_layer = (lambda: 4)()", "the value of n_layer is not a literal"),
        ("n_layer = True + 1", "the value of n_layer is not a literal"),
        ("n_layer = 7 % 4", "the value of n_layer is not a literal"),
        ("n_layer = 1 << 40", "the value of n_layer is not a literal"),
        ("n_layer = 1 / 0", "the value of n_layer is not a literal"),
        ("n_layer = ...", "the value of n_layer is not a literal"),
        ("n_layers = 4", "unknown setting 'n_layers'; did you mean n_layer?"),
        ("max_len = 4", "unknown setting 'max_len'"),
        ("n_layer = = 4", "not Python syntax"),
        ("  n_layer = 4", "not Python syntax"),
    ],
)
def test_what_is_not_a_literal_is_refused_with_its_line(line, reason, written):
    path = written(f'"""A docstring."""\nn_embd = 64\n\n{line}\n')
    assert refused([path]).startswith(f"{path}:4: {reason}")


def test_a_config_file_never_runs(written, tmp_path):
    trace = tmp_path / "trace"
    for line in (
        f"open({str(trace)!r}, 'w')", f"n_layer = open({str(trace)!r}, 'w')", f"__import__('os').mkdir({str(trace)!r})",
        f"n_layer = [open({str(trace)!r}, 'w')]", f'out_dir = f"{{open({str(trace)!r}, mode=chr(119))}}"',
    ):  # fmt: skip
        compile(line, "line", "exec")  # it would leave its trace if it ran
        assert "read, never executed" in refused([written(line)])
        assert not trace.exists()


def test_files_that_cannot_be_read(written, tmp_path):
    missing = str(tmp_path / "missing.py")
    assert refused([missing]) == f"{missing}: no such config file; configs/ holds examples"
    undecodable = written(b"out_dir = '\xe9'")
    assert refused([undecodable]).startswith(f"{undecodable}: cannot be read ('utf-8' codec can't decode byte 0xe9")
    assert refused([str(tmp_path)]).startswith(f"{tmp_path}: cannot be read ([Errno ")
    null = written(b"n_layer = 1\0")
    assert refused([null]).startswith(f"{null}: not Python syntax")
    assert read_settings(written(""), Config) == {}


@pytest.mark.parametrize("text", ["1", "None", "True", "2.5"])
def test_a_string_in_a_file_is_quoted(text, written):
    path = written(f"out_dir = {text}")
    assert refused([path]) == f"{path}:1: out_dir expects a string, got {text}"
