"""Settings: where they come from, what is refused and in which words, and that nanoGPT's config files mean the same."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

import config
from config import ROOT, Config, ConfigError, check, command, dump, load, read_file, resolve
from hardware import Device, accelerator

CPU = Device("a processor", "cpu")
DEFAULTS = Config()


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a config file and returns its path as a command line has it."""

    def write(text, name="run.py"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return str(tmp_path / name)

    return write


def changed(argv):
    """Return what a command line changes of the defaults."""
    settings, _ = load(argv)
    return {name: value for name, value in vars(settings).items() if value != getattr(DEFAULTS, name)}


def refused(argv, options=None):
    """Return what a command line is refused with: one line."""
    with pytest.raises(ConfigError) as caught:
        load(argv, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- where settings come from


def test_flags_beat_files_and_later_files_beat_earlier_ones(written):
    first = written("n_layer = 2\nn_head = 2\nn_embd = 64\n", "first.py")
    second = written("n_head = 4\nn_embd = 32\n", "second.py")
    assert changed([]) == {}
    assert changed([first]) == {"n_layer": 2, "n_head": 2, "n_embd": 64}
    assert changed([first, second]) == {"n_layer": 2, "n_head": 4, "n_embd": 32}
    assert changed([second, first]) == {"n_layer": 2, "n_head": 2, "n_embd": 64}
    # wherever the flag stands
    for argv in (["--n_embd=16", first, second], [first, "--n_embd=16", second], [first, second, "--n_embd=16"]):
        assert changed(argv) == {"n_layer": 2, "n_head": 4, "n_embd": 16}
    assert changed(["--n_embd=16", "--n_embd=8"]) == {"n_embd": 8}


@pytest.mark.parametrize("argv", [["--batch_size=8"], ["--batch_size", "8"], ["--batch_size", " 8 "]])
def test_both_forms_of_a_flag(argv):
    assert changed(argv) == {"batch_size": 8}


def test_a_negative_number_and_an_equals_sign_are_values():
    assert changed(["--learning_rate", "-1"]) == {"learning_rate": -1.0}
    assert changed(["--out_dir=lr=3", "--dataset", "a=b"]) == {"out_dir": "lr=3", "dataset": "a=b"}


def test_a_file_may_have_an_equals_sign_in_its_name(written):
    assert changed([written("n_layer = 2", "n_layer=2.py")]) == {"n_layer": 2}


@dataclass(frozen=True)
class Options:
    """Do something with a model."""

    gpu: str | None = None  # a card
    mode: Literal["fast", "slow"] = "fast"
    dry: bool = False  # touch nothing
    share: float = 0.5


def test_a_commands_own_options_stand_beside_the_settings(written):
    settings, options = load(
        ["--gpu=h200", "--dry", "--n_layer", "2", written("n_head = 2"), "--share=1", "--mode", "slow"], Options
    )
    assert (settings.n_layer, settings.n_head) == (2, 2)
    assert options == Options(gpu="h200", mode="slow", dry=True, share=1.0) and type(options.share) is float
    assert load([], Options)[1] == Options()
    assert load(["--dry=False"], Options)[1].dry is False
    assert refused(["--mode=medium"], Options) == "--mode=medium: mode expects 'fast' or 'slow', got 'medium'"
    assert "unknown setting --gpu" in refused(["--gpu=h200"])
    assert "unknown setting 'gpu'" in refused([written("gpu = 'h200'")], Options)  # files hold settings only


def test_a_text_stays_a_text_whatever_it_looks_like():
    assert changed(["--out_dir=5", "--dataset=None", "--wandb_project='owt'"]) == {
        "out_dir": "5", "dataset": "None", "wandb_project": "'owt'"
    }  # fmt: skip
    for text in ("40", "1e3", "'a'", "[", "3-3"):
        assert load([f"--gpu={text}"], Options)[1].gpu == text
    assert load(["--gpu=None"], Options)[1].gpu is None


# --- what is refused on a command line


@pytest.mark.parametrize(
    "argv, message",
    [
        (["batch_size=32"], "argument 'batch_size=32': write --batch_size=32"),
        (["-batch_size=32"], "argument '-batch_size=32': write --batch_size=32"),
        (["-batch_size", "32"], "argument '-batch_size': write --batch_size"),
        (["--bath_size=32"], "unknown setting --bath_size; did you mean batch_size?"),
        (["--batch-size", "32"], "unknown setting --batch-size; did you mean batch_size?"),
        (["--n_layers=3"], "unknown setting --n_layers; did you mean n_layer?"),
        (["--zzz=1"], "unknown setting --zzz; --help lists all settings"),
        (["--"], "unknown setting --; --help lists all settings"),
        (["--batch_size"], "--batch_size needs a value: --batch_size=VALUE"),
        (["--out_dir", "--n_layer=3"], "--out_dir needs a value: --out_dir=VALUE"),
        (["--compile"], "--compile needs a value: --compile=VALUE"),
        (["32"], "32: no such config file; configs/ holds examples"),
    ],
)
def test_malformed_arguments_are_named(argv, message):
    assert refused(argv) == message


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
    given = getattr(load([f"--{flag}"])[0], name)
    assert given == value and type(given) is type(value)
    in_file = repr(value) if isinstance(value, str) else text
    read = read_file(written(f"{name} = {in_file}"))[name]
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


@pytest.mark.parametrize("text", ["1", "None", "True", "2.5"])
def test_a_text_in_a_file_is_quoted(text, written):
    path = written(f"out_dir = {text}")
    assert refused([path]) == f"{path}:1: out_dir expects a text, got {text}"


def test_a_mistake_is_one_line_on_stderr_and_status_2(capsys):
    assert command(lambda argv: load(argv) and None)(["--n_layers=3"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: unknown setting --n_layers; did you mean n_layer?\n")


# --- config files


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
    assert read_file(path) == {
        "gradient_accumulation_steps": 40, "max_iters": 499998, "learning_rate": -2.25, "vocab_size": 65536,
        "out_dir": "out-one", "bias": True, "n_layer": 2,
    }  # fmt: skip


def test_a_file_with_a_byte_order_mark(written):
    assert read_file(written(b"\xef\xbb\xbfn_layer = 4\n")) == {"n_layer": 4}


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


def test_a_config_file_never_runs(written, tmp_path):
    trace = tmp_path / "trace"
    for line in (
        f"open({str(trace)!r}, 'w')", f"n_layer = open({str(trace)!r}, 'w')", f"__import__('os').mkdir({str(trace)!r})",
        f"n_layer = [open({str(trace)!r}, 'w')]", f'out_dir = f"{{open({str(trace)!r}, mode=chr(119))}}"',
    ):  # fmt: skip
        compile(line, "line", "exec")  # it would leave its trace if it ran
        assert "read, never run" in refused([written(line)])
        assert not trace.exists()


def test_files_that_cannot_be_read(written, tmp_path):
    missing = str(tmp_path / "missing.py")
    assert refused([missing]) == f"{missing}: no such config file; configs/ holds examples"
    undecodable = written(b"out_dir = '\xe9'")
    assert refused([undecodable]).startswith(f"{undecodable}: cannot be read ('utf-8' codec can't decode byte 0xe9")
    assert refused([str(tmp_path)]).startswith(f"{tmp_path}: cannot be read ([Errno ")
    null = written(b"n_layer = 1\0")
    assert refused([null]).startswith(f"{null}: not Python syntax")
    assert read_file(written("")) == {}


def test_configs_of_this_project_are_read():
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for file in files:
        check(load([str(file)])[0])


# --- --help


def test_help_lists_every_setting_with_its_comment(capsys):
    with pytest.raises(SystemExit) as exit:
        load(["--n_layer=3", "--help"], Options)
    assert exit.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert "Do something with a model." in shown and any("CONFIG.py" in line for line in shown)
    source = Path(config.__file__).read_text(encoding="utf-8").splitlines()
    for field in dataclasses.fields(Config):
        (declared,) = (line.strip() for line in source if line.startswith(f"    {field.name}: "))
        assert f"  --{declared}" in shown
    for line in ("gpu: str | None = None  # a card", "dry: bool = False  # touch nothing"):
        assert f"  --{line}" in shown
    assert len([line for line in shown if line.startswith("  --")]) == len(dataclasses.fields(Config)) + 4


@pytest.mark.parametrize("script", ["train.py", "accounting.py", "sample.py", "data/prepare.py"])
def test_help_is_at_once_and_without_torch(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    probe = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert "torch was imported" in probe.stderr
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, ROOT / script, "--help"], env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "") and "--" in done.stdout and "field(" not in done.stdout
    # seconds of the processor: other processes share the machine
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5


# --- writing


@pytest.mark.parametrize("title", ["Plain.", 'C:\\Users\\new "quoted" """three""" \'', "two\nlines", "字"])
def test_dump_is_a_config_file_with_the_same_values(title, written):
    settings = dataclasses.replace(
        DEFAULTS,
        learning_rate=1e-5 / 3,
        out_dir="C:\\Users\\new 'x' \"y\"\n字",
        compile=False,
        grad_clip=None,
        seed=2**40,
    )
    path = written(dump(settings, title))
    assert Config(**read_file(path)) == settings
    assert read_file(path).keys() == {field.name for field in dataclasses.fields(Config)}


# --- checking


@pytest.mark.parametrize(
    "name",
    ["n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "eval_interval",
     "log_interval", "mlp_context"],
)  # fmt: skip
def test_what_must_be_at_least_1(name):
    for value in (0, -3):
        with pytest.raises(ConfigError, match=f"^{name}={value} must be at least 1$"):
            check(dataclasses.replace(DEFAULTS, **{name: value}))


@pytest.mark.parametrize("name", ["n_kv_head", "head_dim", "d_ff", "vocab_size", "eval_iters"])
def test_what_must_be_at_least_1_or_none(name):
    with pytest.raises(ConfigError, match=f"^{name}=0 must be at least 1, or None$"):
        check(dataclasses.replace(DEFAULTS, **{name: 0}))
    check(dataclasses.replace(DEFAULTS, **{name: None}))


@pytest.mark.parametrize(
    "name",
    ["max_iters", "warmup_iters", "lr_decay_iters", "learning_rate", "min_lr", "weight_decay", "seed", "sample_tokens",
     "norm_eps"],
)  # fmt: skip
def test_what_must_not_be_negative(name):
    with pytest.raises(ConfigError, match=f"^{name}=-1 must not be negative$"):
        check(dataclasses.replace(DEFAULTS, **{name: -1}))
    check(dataclasses.replace(DEFAULTS, **{name: 0}))


@pytest.mark.parametrize("name", ["dropout", "attn_dropout", "beta1", "beta2"])
def test_what_must_be_a_fraction(name):
    for value in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=rf"^{name}={value} must lie in \[0, 1\)$"):
            check(dataclasses.replace(DEFAULTS, **{name: value}))
    check(dataclasses.replace(DEFAULTS, **{name: 0.0}))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"grad_clip": -1.0}, "grad_clip=-1.0 must not be negative; None turns clipping off"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be positive"),
        ({"out_dir": ""}, "out_dir is empty; name a folder"),
        ({"dataset": ""}, "dataset is empty; name a folder below data/"),
        ({"model": "mlp", "mlp_context": 9, "block_size": 8}, "mlp_context=9 is longer than block_size=8"),
        (
            {"n_embd": 100, "n_head": 12},
            "n_embd=100 does not divide by n_head=12; n_embd=108 does, or set head_dim",
        ),
        ({"n_head": 12, "n_kv_head": 5}, "n_head=12 does not divide by n_kv_head=5; it may be 1, 2, 3, 4, 6, 12"),
        ({"n_head": 2, "n_kv_head": 4}, "n_head=2 does not divide by n_kv_head=4; it may be 1, 2"),
        (
            {"pos": "rope", "n_embd": 36, "n_head": 12},
            "pos='rope' rotates pairs: head_dim=3 must be even",
        ),
        ({"pos": "rope", "head_dim": 7}, "pos='rope' rotates pairs: head_dim=7 must be even"),
    ],
)  # fmt: skip
def test_contradictions(settings, message):
    with pytest.raises(ConfigError) as caught:
        check(dataclasses.replace(DEFAULTS, **settings))
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:  # prediction and run both come this way
        resolve(dataclasses.replace(DEFAULTS, **settings), CPU)
    assert str(caught.value) == message


def test_what_only_looks_like_a_contradiction():
    check(dataclasses.replace(DEFAULTS, n_embd=100, head_dim=64))
    check(dataclasses.replace(DEFAULTS, n_embd=36))  # heads of 3 channels, but nothing to rotate
    check(dataclasses.replace(DEFAULTS, model="mlp", n_embd=100))  # no heads at all
    check(dataclasses.replace(DEFAULTS, grad_clip=0.0, eval_iters=None))


# --- resolving


def test_resolve_fills_what_depends_on_shape_and_machine():
    resolved = resolve(dataclasses.replace(DEFAULTS, vocab_size=50257, grad_clip=0.0), CPU)
    assert dataclasses.replace(DEFAULTS, **{
        "n_kv_head": 12, "head_dim": 64, "d_ff": 3072, "vocab_size": 50257, "grad_clip": None, "device": "cpu",
        "dtype": "float32", "compile": False, "compile_optimizer": True, "loss_chunk": 512,
    }) == resolved  # fmt: skip
    given = dict(
        n_kv_head=4,
        head_dim=32,
        d_ff=100,
        vocab_size=7,
        device="cuda:1",
        dtype="float32",
        compile=False,
        compile_optimizer=True,
        grad_clip=2.0,
        loss_chunk=5,
    )
    assert resolve(dataclasses.replace(DEFAULTS, **given), accelerator("h100-sxm")) == dataclasses.replace(
        DEFAULTS, **given
    )


@pytest.mark.parametrize("n_embd, d_ff", [(768, 2048), (4096, 10944), (64, 192), (24, 64)])
def test_the_width_of_swiglu(n_embd, d_ff):
    """8/3 of the width, rounded up to a multiple of 64, has as many weights in three matrices as 4 has in two."""
    resolved = resolve(dataclasses.replace(DEFAULTS, activation="swiglu", n_embd=n_embd, n_head=1, vocab_size=7), CPU)
    assert resolved.d_ff == d_ff


@pytest.mark.parametrize(
    "gpu, expected", [("h100-sxm", ("cuda", "bfloat16", True)), ("v100-sxm-16gb", ("cuda", "float16", True))]
)
def test_auto_on_accelerators(gpu, expected):
    resolved = resolve(dataclasses.replace(DEFAULTS, vocab_size=7), accelerator(gpu))
    assert (resolved.device, resolved.dtype, resolved.compile) == expected


def test_a_processor_with_bfloat16_uses_it():
    native = dataclasses.replace(CPU, dtypes=("float32", "bfloat16"))
    assert resolve(dataclasses.replace(DEFAULTS, vocab_size=7), native).dtype == "bfloat16"


def test_a_dtype_the_device_lacks_is_refused():
    card = accelerator("v100-sxm-16gb")
    with pytest.raises(ConfigError) as caught:
        resolve(dataclasses.replace(DEFAULTS, vocab_size=7, dtype="bfloat16"), card)
    assert str(caught.value) == (
        f"dtype='bfloat16': {card.name} has no bfloat16 matmuls; --dtype=float16, or auto, fits it"
    )


@pytest.mark.parametrize("settings", [{}, {"activation": "swiglu", "grad_clip": 0.0}, {"model": "mlp", "n_embd": 7}])
@pytest.mark.parametrize("device", [CPU, accelerator("h100-sxm"), accelerator("v100-sxm-16gb")])
def test_a_resolved_config_resolves_to_itself(settings, device):
    resolved = resolve(dataclasses.replace(DEFAULTS, vocab_size=7, **settings), device)
    assert resolve(resolved, device) == resolved
    assert None not in {resolved.n_kv_head, resolved.head_dim, resolved.d_ff, resolved.vocab_size}
    assert "auto" not in {resolved.device, resolved.dtype, resolved.compile}


def test_the_vocabulary_comes_from_the_data(tmp_path):
    settings = dataclasses.replace(DEFAULTS, dataset=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve(settings, CPU)
    assert str(caught.value) == (
        f"{tmp_path}: no prepared data there, so vocab_size is unknown; "
        f"run python data/prepare.py {tmp_path}, or set --vocab_size"
    )
    (tmp_path / "train.bin").touch()
    assert resolve(settings, CPU).vocab_size == 50304  # nanoGPT's own folder: GPT-2's, rounded up as there
    for broken in ("", "{", "[]", "{}", '{"vocab_size": null}', '{"vocab_size": "many"}'):
        (tmp_path / "meta.json").write_text(broken, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            resolve(settings, CPU)
        assert str(caught.value) == f"{tmp_path / 'meta.json'}: not a readable meta.json; prepare the data again"
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 65}), encoding="utf-8")
    assert resolve(settings, CPU).vocab_size == 65
    assert resolve(dataclasses.replace(settings, vocab_size=128), CPU).vocab_size == 128


def test_derived_figures():
    settings = dataclasses.replace(DEFAULTS, batch_size=4, block_size=32, gradient_accumulation_steps=5)
    assert (settings.tokens_per_micro_step, settings.tokens_per_step) == (128, 640)
    assert Config(dataset="mine").data_dir == ROOT / "data" / "mine"
    assert Config(dataset="./mine").data_dir == Path("mine")


# --- nanoGPT's configs mean here what they mean there

# What nanoGPT's train.py sets on an A100 before it reads a config; 50304 is what its model takes without a meta.pkl.
NANOGPT_DEFAULTS = dict(
    out_dir="out", eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False, always_save_checkpoint=True,
    init_from="scratch", wandb_log=False, wandb_project="owt", wandb_run_name="gpt2", dataset="openwebtext",
    gradient_accumulation_steps=40, batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0,
    bias=False, learning_rate=0.0006, max_iters=600000, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
    decay_lr=True, warmup_iters=2000, lr_decay_iters=600000, min_lr=0.00006, backend="nccl", device="cuda",
    dtype="bfloat16", compile=True, vocab_size=50304,
)  # fmt: skip

# What each of its config files sets: {name: (as written there, what it is)}.
NANOGPT_FILES = {
    "train_gpt2": {
        "wandb_log": ("True", True), "wandb_project": ("'owt'", "owt"), "wandb_run_name": ("'gpt2-124M'", "gpt2-124M"),
        "batch_size": ("12", 12), "block_size": ("1024", 1024), "gradient_accumulation_steps": ("5 * 8", 40),
        "max_iters": ("600000", 600000), "lr_decay_iters": ("600000", 600000), "eval_interval": ("1000", 1000),
        "eval_iters": ("200", 200), "log_interval": ("10", 10), "weight_decay": ("1e-1", 0.1),
    },
    "train_shakespeare_char": {
        "out_dir": ("'out-shakespeare-char'", "out-shakespeare-char"), "eval_interval": ("250", 250),
        "eval_iters": ("200", 200), "log_interval": ("10", 10), "always_save_checkpoint": ("False", False),
        "wandb_log": ("False", False), "wandb_project": ("'shakespeare-char'", "shakespeare-char"),
        "wandb_run_name": ("'mini-gpt'", "mini-gpt"), "dataset": ("'shakespeare_char'", "shakespeare_char"),
        "gradient_accumulation_steps": ("1", 1), "batch_size": ("64", 64), "block_size": ("256", 256),
        "n_layer": ("6", 6), "n_head": ("6", 6), "n_embd": ("384", 384), "dropout": ("0.2", 0.2),
        "learning_rate": ("1e-3", 0.001), "max_iters": ("5000", 5000), "lr_decay_iters": ("5000", 5000),
        "min_lr": ("1e-4", 0.0001), "beta2": ("0.99", 0.99), "warmup_iters": ("100", 100),
    },
    **{
        f"eval_{name.replace('-', '_')}": {
            "batch_size": ("8", 8), "eval_iters": ("500", 500), "eval_only": ("True", True),
            "wandb_log": ("False", False), "init_from": (f"'{name}'", name),
        } for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
}  # fmt: skip


@pytest.fixture
def nanogpt_data(tmp_path, monkeypatch):
    """Two data folders: OpenWebText as nanoGPT leaves it, and tinyshakespeare by characters as prepared here."""
    monkeypatch.setattr(config, "ROOT", tmp_path)
    for name in ("openwebtext", "shakespeare_char"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.bin").touch()
    (tmp_path / "data" / "shakespeare_char" / "meta.json").write_text('{"vocab_size": 65}', encoding="utf-8")


def test_nanogpts_defaults_are_the_defaults(nanogpt_data):
    expected = NANOGPT_DEFAULTS | {"device": "auto", "dtype": "auto", "compile": "auto", "vocab_size": None}
    assert {name: getattr(DEFAULTS, name) for name in expected} == expected
    assert {type(getattr(DEFAULTS, name)) for name in expected} == {type(value) for value in expected.values()}
    resolved = resolve(DEFAULTS, accelerator("a100-40gb"))
    assert {name: getattr(resolved, name) for name in NANOGPT_DEFAULTS} == NANOGPT_DEFAULTS


@pytest.mark.parametrize("name", NANOGPT_FILES)
def test_nanogpts_config_files_resolve_to_the_same_values(name, written, nanogpt_data):
    lines = NANOGPT_FILES[name]
    path = written("# a comment\n" + "\n".join(f"{key} = {text} # another" for key, (text, _) in lines.items()))
    resolved = resolve(load([path])[0], accelerator("a100-40gb"))
    expected = NANOGPT_DEFAULTS | {key: value for key, (_, value) in lines.items()}
    if expected["dataset"] == "shakespeare_char":
        expected["vocab_size"] = 65
    for key, value in expected.items():
        assert getattr(resolved, key) == value and type(getattr(resolved, key)) is type(value), key


def test_nanogpts_finetuning_config_is_refused_by_line(written):
    """It imports the clock and calls it for a run's name: the one file of nanoGPT's that has to run."""
    path = written("import time\n\nout_dir = 'out-shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n")
    assert refused([path]) == f"{path}:1: only `name = literal` lines are allowed; a config is read, never run"
    path = written("\n\nout_dir = 'out-shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n")
    assert refused([path]) == (f"{path}:4: the value of wandb_run_name is not a literal; a config is read, never run")


@pytest.mark.parametrize(
    "setting",
    ["n_embd=1e30", "block_size=1e300", "n_layer=1e12", "vocab_size=1e200", "batch_size=1e10", "max_iters=1e13"],
)
def test_absurd_sizes_are_refused(setting):
    name, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=f"{name}=.*is beyond any"):
        check(dataclasses.replace(DEFAULTS, **{name: int(float(value))}))


def test_large_sizes_are_checked_at_once():
    check(dataclasses.replace(DEFAULTS, n_head=10**9, n_embd=10**9))
