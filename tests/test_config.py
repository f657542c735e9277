"""Settings: what is checked, what is filled in and from what, and that nanoGPT's config files mean the same here."""

import dataclasses
import re
from pathlib import Path

import pytest

import config
from cli.config_file import read_settings
from cli.errors import ConfigError
from config import LIMITS, ROOT, Config, check, dump, resolve
from data.format import write_meta
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec
from tests.cli.commands import DEFAULTS, given, refused

CPU = DeviceSpec("a processor", "cpu")


def meta_of(vocab_size):
    """Return what meta.json says of data with that vocabulary."""
    counts = {"tokens": 9, "bytes": 9, "largest_id": vocab_size - 1}
    return {"vocab_size": vocab_size, "dtype": "uint16", "tokenizer": {}, "splits": {"train": counts, "val": counts}}


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
    assert Config(**read_settings(path, Config)) == settings
    assert read_settings(path, Config).keys() == {field.name for field in dataclasses.fields(Config)}


# --- checking


def refusal(**settings):
    """Return what a config that differs from the default one by these settings is refused with."""
    with pytest.raises(ConfigError) as caught:
        check(dataclasses.replace(DEFAULTS, **settings))
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "eval_interval",
     "log_interval", "mlp_context"],
)  # fmt: skip
def test_what_must_be_at_least_1(name):
    for value in (0, -3, 10**9 + 1):
        assert refusal(**{name: value}) == f"{name}={value} must be from 1 to 10^9"


@pytest.mark.parametrize("name", ["n_kv_head", "head_dim", "d_ff", "vocab_size", "eval_iters", "loss_chunk"])
def test_what_must_be_at_least_1_or_none(name):
    for value in (0, -3, 10**9 + 1):
        assert refusal(**{name: value}) == f"{name}={value} must be from 1 to 10^9"
    check(dataclasses.replace(DEFAULTS, **{name: None}))
    check(dataclasses.replace(DEFAULTS, **{name: 1}))


@pytest.mark.parametrize(
    "name, words, most",
    [
        ("max_iters", "from 0 to 10^12", 10**12),
        ("warmup_iters", "from 0 to 10^12", 10**12),
        ("lr_decay_iters", "from 0 to 10^12", 10**12),
        ("sample_tokens", "from 0 to 10^12", 10**12),
        ("seed", "from 0 to 2^63 - 1", 2**63 - 1),
        ("learning_rate", "0 or more", None),
        ("min_lr", "0 or more", None),
        ("weight_decay", "0 or more", None),
        ("norm_eps", "0 or more", None),
    ],
)
def test_what_must_not_be_negative(name, words, most):
    assert refusal(**{name: -1}) == f"{name}=-1 must be {words}"
    check(dataclasses.replace(DEFAULTS, **{name: 0}))
    if most:
        check(dataclasses.replace(DEFAULTS, **{name: most}))
        assert refusal(**{name: most + 1}) == f"{name}={most + 1} must be {words}"


@pytest.mark.parametrize("name", ["dropout", "attn_dropout", "beta1", "beta2"])
def test_what_must_be_a_fraction(name):
    for value in (-0.1, 1.0):
        assert refusal(**{name: value}) == f"{name}={value} must be at least 0 and below 1"
    check(dataclasses.replace(DEFAULTS, **{name: 0.0}))


def test_every_number_has_a_limit():
    limited = [name for _, names in LIMITS.values() for name in names.split()]
    numbers = [f.name for f in dataclasses.fields(Config) if re.search(r"\b(int|float)\b", str(f.type))]
    assert sorted(limited) == sorted(numbers)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"grad_clip": -1.0}, "grad_clip=-1.0 must be 0 or more"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be above 0"),
        ({"out_dir": ""}, "out_dir is empty; name a folder"),
        ({"dataset": ""}, "dataset is empty; name a folder in data/"),
        ({"model": "mlp", "mlp_context": 9, "block_size": 8}, "mlp_context=9 is longer than block_size=8"),
        (
            {"n_embd": 100, "n_head": 12},
            "n_embd=100 does not divide by n_head=12; n_embd=108 does, or set head_dim",
        ),
        ({"n_head": 12, "n_kv_head": 5}, "n_head=12 does not divide by n_kv_head=5; it may be 1, 2, 3, 4, 6, 12"),
        ({"n_head": 2, "n_kv_head": 4}, "n_head=2 does not divide by n_kv_head=4; it may be 1, 2"),
        (
            {"pos": "rope", "n_embd": 36, "n_head": 12},
            "pos='rope' rotates pairs, so head_dim=3 must be even",
        ),
        ({"pos": "rope", "head_dim": 7}, "pos='rope' rotates pairs, so head_dim=7 must be even"),
    ],
)  # fmt: skip
def test_contradictions(settings, message):
    with pytest.raises(ConfigError) as caught:
        check(dataclasses.replace(DEFAULTS, **settings))
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:  # prediction and run both come this way
        resolve(dataclasses.replace(DEFAULTS, **settings), CPU)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "setting, most",
    [("n_embd=1e30", "10^9"), ("block_size=1e300", "10^9"), ("n_layer=1e12", "10^9"), ("vocab_size=1e200", "10^9"),
     ("batch_size=1e10", "10^9"), ("max_iters=1e13", "10^12")],
)  # fmt: skip
def test_absurd_sizes_are_refused(setting, most):
    name, _, value = setting.partition("=")
    value = int(float(value))
    least = 0 if name == "max_iters" else 1
    assert refusal(**{name: value}) == f"{name}={value} must be from {least} to {most}"


def test_large_sizes_are_checked_at_once():
    check(dataclasses.replace(DEFAULTS, n_head=10**9, n_embd=10**9))


def test_what_only_looks_like_a_contradiction():
    check(dataclasses.replace(DEFAULTS, n_embd=100, head_dim=64))
    check(dataclasses.replace(DEFAULTS, n_embd=36))  # heads of 3 channels, but nothing to rotate
    check(dataclasses.replace(DEFAULTS, model="mlp", n_embd=100))  # no heads at all
    check(dataclasses.replace(DEFAULTS, grad_clip=0.0, eval_iters=None))


def test_configs_of_this_project_are_read():
    files = sorted((ROOT / "configs").glob("*.py"))
    assert files
    for file in files:
        check(given([str(file)])[0])


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
    assert str(caught.value) == (f"dtype='bfloat16': {card.name} has no bfloat16 matmuls; use --dtype=float16, or auto")


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
    write_meta(tmp_path / "meta.json", meta_of(65))
    assert resolve(settings, CPU).vocab_size == 65
    assert resolve(dataclasses.replace(settings, vocab_size=128), CPU).vocab_size == 128
    (tmp_path / "meta.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"meta\.json: not a readable meta\.json; run python data/prepare\.py "):
        resolve(settings, CPU)
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
    write_meta(tmp_path / "data" / "shakespeare_char" / "meta.json", meta_of(65))


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
    resolved = resolve(given([path])[0], accelerator("a100-40gb"))
    expected = NANOGPT_DEFAULTS | {key: value for key, (_, value) in lines.items()}
    if expected["dataset"] == "shakespeare_char":
        expected["vocab_size"] = 65
    for key, value in expected.items():
        assert getattr(resolved, key) == value and type(getattr(resolved, key)) is type(value), key


def test_nanogpts_finetuning_config_is_refused_by_line(written):
    """It imports the clock and calls it for a run's name: the one file of nanoGPT's that has to run."""
    path = written("import time\n\nout_dir = 'out-shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n")
    assert refused([path]) == f"{path}:1: only `name = literal` lines are allowed; a config is read, never executed"
    path = written("\n\nout_dir = 'out-shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n")
    assert refused([path]) == (
        f"{path}:4: the value of wandb_run_name is not a literal; a config is read, never executed"
    )
