"""The schedule against what torch counts, saves and allocates, and against published figures."""

import dataclasses
import itertools
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import accounting
from accounting import refuse_what_cannot_fit
from config import Config, ConfigError, read_file, resolve
from hardware import Device, accelerator
from measure import counted_flops, profiled_peak, standing_bytes
from model import build
from optimizer import AdamW, clip_factor, gradient_norm, parameter_groups
from prediction import Timeline, largest_batch, parameters, predict, step_flops, step_memory
from schedule import generation, schedule
from units import parse_memory

ROOT = Path(__file__).resolve().parents[1]
CPU = Device(
    "a CPU", "cpu", 2**34, {"bfloat16": 4e11, "float32": 2e11}, source="a test", dtypes=("float32", "bfloat16")
)
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False}
LONG = {"n_layer": 1, "n_embd": 16, "block_size": 600, "vocab_size": 20, "batch_size": 1}
GRID = {
    "gpt2": {},
    "gpt2 with bias, untied": {"bias": True, "tie_weights": False},
    "odd sizes": {"bias": True, "batch_size": 1, "block_size": 7, "n_embd": 36, "tie_weights": False},
    "dropout": {"dropout": 0.1, "bias": True},
    "attn_dropout": {"attn_dropout": 0.1},
    "attn_dropout with groups": {"attn_dropout": 0.1, "n_kv_head": 2},
    "llama": LLAMA,
    "llama, one key-value head": {**LLAMA, "n_kv_head": 1, "head_dim": 24, "d_ff": 100, "tie_weights": True},
    "qk_norm, relu2, rope": {"pos": "rope", "norm": "rmsnorm", "qk_norm": True, "activation": "relu2"},
    "layernorm with rope, dropout": {"pos": "rope", "qk_norm": True, "dropout": 0.2},
    "mlp": {"model": "mlp"},
    "mlp with rmsnorm": {"model": "mlp", "mlp_context": 3, "norm": "rmsnorm", "bias": True, "dropout": 0.1},
    "chunked loss": {"loss_chunk": 32},
    "chunked loss, a rest": {"loss_chunk": 40, "vocab_size": 9000, "bias": True, "tie_weights": False},
    "chunked loss, untied": {**LLAMA, "loss_chunk": 7, "batch_size": 1},
    "wide, few tokens": {"n_embd": 256, "block_size": 8, "batch_size": 1, "vocab_size": 20},
    "tall, small vocabulary": {"n_layer": 4, "n_embd": 128, "block_size": 64, "vocab_size": 20},
    "peak in attention": LONG,
    "peak in attention, grouped heads": {**LONG, "n_kv_head": 2, "batch_size": 3},
}  # fmt: skip


RECOMPUTED = {
    f"{name}, {recompute}": {**GRID[name], "recompute": recompute}
    for name in (
        "gpt2",
        "gpt2 with bias, untied",
        "dropout",
        "attn_dropout with groups",
        "llama",
        "qk_norm, relu2, rope",
        "mlp",
        "chunked loss",
    )
    for recompute in ("attention", "block")
    if not (name == "mlp" and recompute == "attention")
}
ALL = {**GRID, **RECOMPUTED}


def config_of(**settings):
    own = {"gradient_accumulation_steps": 1, "compile_optimizer": False, "dtype": "float32"}
    return resolve(Config(**{**SMALL, **own, **settings}), CPU)


def total_flops(config):
    return sum(op.flops * op.times for op in schedule(config, CPU).ops)


class Step:
    """A training step as train.py makes it, on random tokens."""

    def __init__(self, config):
        self.config, self.model = config, build(config)
        self.model.init_weights(0)
        self.optimizer = AdamW(parameter_groups(self.model, 0.1), 1e-3, (0.9, 0.95), compiled=config.compile_optimizer)
        self.autocast = torch.autocast("cpu", getattr(torch, config.dtype), enabled=config.dtype != "float32")
        shape = (config.batch_size, config.block_size)
        self.x, self.y = torch.randint(config.vocab_size, shape), torch.randint(config.vocab_size, shape)

    def forward(self):
        with self.autocast:
            return self.model(self.x, self.y, scale=1 / self.config.gradient_accumulation_steps)

    def __call__(self):
        for _ in range(self.config.gradient_accumulation_steps):
            self.forward().backward()
        norm = gradient_norm(self.optimizer.parameters)
        self.optimizer.step(clip_factor(norm, 1.0), apply=norm.isfinite())
        self.optimizer.zero_grad()

    def standing(self):
        moments = [t for pair in self.optimizer.state() for t in pair]
        return standing_bytes([*self.model.parameters(), *self.model.buffers(), *moments, self.x, self.y])


# --- against torch


@pytest.mark.parametrize("shape", GRID)
def test_parameters_are_the_models_own_name_by_name(shape):
    config = config_of(**GRID[shape])
    with torch.device("meta"):
        own = {name: tuple(p.shape) for name, p in build(config).named_parameters()}
    assert {name: p.shape for name, p in schedule(config, CPU).params.items()} == own


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", ALL)
def test_flops_equal_what_torch_counts(shape, accumulation):
    config = config_of(gradient_accumulation_steps=accumulation, **ALL[shape])
    with torch.device("meta"):
        model = build(config)
    assert total_flops(config) == counted_flops(model, config)


@pytest.mark.parametrize("shape", ALL)
def test_forward_and_backward_flops_equal_what_torch_counts(shape):
    """Apart, as executed: a loss in chunks makes its gradients in forward, recomputation is in backward."""
    config = config_of(**ALL[shape])
    with torch.device("meta"):
        model, idx = build(config), torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = model(idx, idx)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    ops = schedule(config, CPU).ops
    predicted = [sum(op.flops * op.times for op in ops if op.phase == phase) for phase in ("forward", "backward")]
    assert predicted == [forward.get_total_flops(), backward.get_total_flops()]


def saved_by_torch(step):
    """Return the bytes of each storage that autograd keeps of a forward, the model's own left out."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert step.forward().requires_grad
    of_the_model = {t.untyped_storage().data_ptr() for t in [*step.model.parameters(), *step.model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return [n for pointer, n in storages.items() if pointer not in of_the_model]


def saved_by_schedule(config):
    """Return the bytes of each buffer that the schedule's backward reads of its forward, the batch included."""
    s = schedule(config, CPU)
    batch = {b for op in s.ops if op.phase == "backward" for b in op.reads if b.kind == "batch"}
    return [b.bytes for b, count in Timeline(s).saved() for _ in range(count)] + [b.bytes for b in batch]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", GRID)
def test_each_tensor_that_autograd_saves_is_a_buffer_of_the_schedule(shape, dtype):
    config = config_of(dtype=dtype, **GRID[shape])
    saved, predicted = saved_by_torch(Step(config)), saved_by_schedule(config)
    assert sum(predicted) == sum(saved)
    assert sorted(predicted) == sorted(saved)


def bias_too_early(config):
    """Return the bytes of a bias's gradient, which a recomputed matmul makes when what it kept is gone already."""
    return 4 * config.n_embd if config.bias and config.recompute == "block" else 0


SCALARS = 64  # bytes: the loss, its parts and the optimizer's few numbers, which the schedule leaves out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ALL)
def test_the_peak_is_that_of_torchs_memory_tracker(shape, dtype):
    config = config_of(dtype=dtype, **ALL[shape])
    step = Step(config)
    step()  # the steady step is what is predicted
    tracker = MemTracker()
    tracker.track_external(step.model, step.x, step.y, *itertools.chain(*step.optimizer.state()))
    with tracker:
        step()
    (measured,) = (device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    t = Timeline(schedule(config, CPU))
    unseen = sum(b.bytes * n for b, n in t.alive(t.peak_op) if "random" in b.name)  # made outside of what it tracks
    assert -bias_too_early(config) <= measured - (t.peak - unseen) <= SCALARS


TIED = {"batch_size": 1, "block_size": 7, "vocab_size": 2000}  # its two gradients meet at the peak
TIED = {"tied, few tokens": TIED, "tied, few tokens, chunked loss": TIED | {"loss_chunk": 3}}
WIDE = "wide, few tokens"  # whose peak is the update, unless it takes no temporary
ONE_PASS = {
    f"{name}, AdamW in one pass": GRID[name] | {"compile_optimizer": True} for name in ("wide, few tokens", "gpt2")
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", [*ALL, *TIED, *ONE_PASS])
def test_the_peak_is_what_the_allocator_reached(shape, accumulation):
    """In float32: on a CPU a bfloat16 matmul takes scratch memory of its own, which shows in models so small."""
    config = config_of(gradient_accumulation_steps=accumulation, **{**ALL, **TIED, **ONE_PASS}[shape])
    step = Step(config)
    step()
    measured, *_ = profiled_peak(step, step.standing(), torch.device("cpu"))
    assert -bias_too_early(config) <= measured - Timeline(schedule(config, CPU)).peak <= SCALARS


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp", "chunked loss", "wide, few tokens"])
def test_the_first_step_takes_what_every_other_takes(shape):
    """The moments are there before it; without accumulation no step finds gradients."""
    config = config_of(**GRID[shape])
    step = Step(config)
    first, *_ = profiled_peak(step, step.standing(), torch.device("cpu"))
    assert 0 <= first - Timeline(schedule(config, CPU)).peak <= SCALARS


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp", "chunked loss, a rest"])
def test_fewer_tokens_than_the_context_save_what_a_shorter_context_saves(shape):
    config = config_of(**GRID[shape])
    step = Step(config)
    step.x, step.y = step.x[:, :20].contiguous(), step.y[:, :20].contiguous()
    shorter = dataclasses.replace(config, block_size=20)
    assert sorted(saved_by_torch(step)) == sorted(saved_by_schedule(shorter))


def test_the_peak_of_a_model_of_some_size_is_within_one_percent():
    config = config_of(dtype="bfloat16", n_layer=4, n_embd=256, block_size=128, batch_size=8, vocab_size=1000)
    step = Step(config)
    step()
    measured, *_ = profiled_peak(step, step.standing(), torch.device("cpu"))
    assert math.isclose(Timeline(schedule(config, CPU)).peak, measured, rel_tol=0.01)


def test_what_decides_between_all_logits_and_chunks():
    """Few logits are computed at once; of many, as many as make 2^25 numbers at most."""
    for batch_size, vocab_size, expected in ((3, 300, None), (256, 1024, None), (257, 1024, 2**15), (64, 50304, 512)):
        config = resolve(Config(**SMALL | {"batch_size": batch_size, "vocab_size": vocab_size}), CPU)
        rows = batch_size * config.block_size
        assert config.loss_chunk == (expected and min(expected, rows))
    one = resolve(Config(**SMALL | {"vocab_size": 2**26}), CPU)
    assert one.loss_chunk == 1


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp"])
def test_chunks_never_change_flops(shape):
    totals = {total_flops(config_of(**GRID[shape], loss_chunk=chunk)) for chunk in (None, 1, 7, 32, 96, 1000)}
    assert len(totals) == 1


# --- against published figures


GPT2 = {
    "loss_chunk": None,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "batch_size": 1,
    "vocab_size": 50257,
}


def test_gpt2_figures_of_the_transformer_sizing_notebook():
    """FLOPs of GPT-2 124M at T = 1,024, B = 1, and bytes per saved activation where nothing differs from nanoGPT."""
    config = config_of(**GPT2)
    s = schedule(config, CPU)
    forward = sum(op.flops * op.times for op in s.ops if op.phase == "forward")
    assert forward == 291_648_307_200
    assert sum(op.flops * op.times for op in s.ops) - forward == 583_296_614_400
    assert predict(config, CPU)["model"]["params_matmul"] == 123_532_032


def test_saved_bytes_of_gpt2_as_measured_on_nanogpt_in_float32():
    config = config_of(**{**GPT2, "batch_size": 2})
    s = schedule(config, CPU)
    batch = sum(b.bytes for b in s.standing if b.kind == "batch")
    position_indices = 8 * 1024  # nanoGPT looks its positions up; a slice needs no indices
    assert sum(b.bytes * count for b, count in Timeline(s).saved()) + batch + position_indices == 1_633_878_020


# --- what must not matter does not, and what must does


def test_tying_changes_parameters_and_never_flops():
    tied, untied = config_of(), config_of(tie_weights=False)
    assert total_flops(tied) == total_flops(untied)
    apart = predict(untied, CPU)["model"]["params"] - predict(tied, CPU)["model"]["params"]
    assert apart == 300 * 64
    assert predict(untied, CPU)["model"]["params_matmul"] == predict(tied, CPU)["model"]["params_matmul"]


def test_fewer_key_value_heads_shrink_projections_and_never_scores():
    def score_flops(config):
        return sum(op.flops for op in schedule(config, CPU).ops if op.name.startswith("attention"))

    per_head = [config_of(n_kv_head=k) for k in (4, 2, 1)]
    assert len({score_flops(c) for c in per_head}) == 1 and score_flops(per_head[0]) > 0
    params = [predict(c, CPU)["model"]["params"] for c in per_head]
    assert params[0] - params[1] == 2 * 2 * 64 * 2 * 16 and params == sorted(params, reverse=True)


def test_accumulation_multiplies_flops_and_keeps_gradients_beside_activations():
    one, three, forty = (config_of(gradient_accumulation_steps=n) for n in (1, 3, 40))
    assert total_flops(three) == 3 * total_flops(one)
    peaks = [Timeline(schedule(c, CPU)).peak for c in (one, three, forty)]
    assert peaks[1] == peaks[2] == peaks[0] + 4 * predict(one, CPU)["model"]["params"]


def test_activations_are_linear_in_the_batch():
    sizes = [predict(config_of(batch_size=b), CPU)["memory"]["activations"] for b in (1, 2, 3, 4)]
    assert sizes == [sizes[0] * b for b in (1, 2, 3, 4)]


def test_what_is_alive_at_the_peak_adds_up_to_it():
    for settings in GRID.values():
        memory = predict(config_of(**settings), CPU)["memory"]
        assert sum(memory["at_peak"].values()) == memory["peak"]


def test_integers_are_integers_and_json_keys_are_there(capsys):
    assert accounting.main(["--vocab_size=65", "--n_layer=2", "--gpu=a100-40gb", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    integers = """model.params model.params_matmul flops.forward_per_token flops.per_token flops.per_step
        flops.six_nd_per_token memory.params memory.gradients memory.optimizer memory.activations memory.loss
        memory.peak"""
    for path in integers.split():
        group, key = path.split(".")
        assert type(printed[group][key]) is int, path
    others = """flops.hardware_per_step memory.peak_at memory.timeline memory.kv_cache_per_token time.step_s
        time.tokens_per_s time.total_s time.days fits max_batch_size roofline"""
    for path in others.split():
        value = printed
        for key in path.split("."):
            value = value[key]
        assert value is not None, path
    assert all(type(entry["bytes"]) is int for entry in printed["memory"]["timeline"])
    assert max(entry["bytes"] for entry in printed["memory"]["timeline"]) == printed["memory"]["peak"]
    assert printed["flops"]["six_nd_per_token"] == 6 * printed["model"]["params"]
    assert printed["fits"] is True and printed["memory"]["peak_at"]


DEEP = {
    "gpt2": {"dropout": 0.1, "attn_dropout": 0.1, "bias": True},
    "llama": {**LLAMA, "qk_norm": True},
    "mlp": {"model": "mlp", "mlp_context": 3},
    "blocks recomputed": {"recompute": "block", "bias": True, "dropout": 0.1},
    "attention recomputed": {**LLAMA, "recompute": "attention"},
    "activations outweigh gradients": {"block_size": 64, "batch_size": 2},
    "gradients outweigh activations": {"block_size": 4, "batch_size": 1, "vocab_size": 30},
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", DEEP)
def test_recording_one_block_for_many_changes_no_figure(name, accumulation):
    for n_layer, dtype in itertools.product((5, 6, 7, 14), ("float32", "bfloat16")):
        config = config_of(**DEEP[name], n_layer=n_layer, dtype=dtype, gradient_accumulation_steps=accumulation)
        short, whole = schedule(config, CPU), schedule(config, CPU, whole=True)
        assert len(short.ops) < len(whole.ops) or n_layer == 5
        for fold in (parameters, step_flops, step_memory):
            assert fold(short) == fold(whole), (fold, n_layer, dtype)
        assert max(op.repeat for op in whole.ops) == 1
        assert sum(op.bytes * op.times for op in short.ops) == sum(op.bytes * op.times for op in whole.ops)


# --- time


def test_time_is_flops_over_peak_and_mfu():
    config = config_of(max_iters=1000)
    time_ = predict(config, CPU, mfu=0.5)["time"]
    assert time_["step_s"] == total_flops(config) / (2e11 * 0.5)
    assert math.isclose(time_["tokens_per_s"] * time_["step_s"], config.tokens_per_step)
    assert time_["total_s"] == 1000 * time_["step_s"]


def test_an_unknown_peak_gives_no_time_rather_than_a_guess(capsys):
    unknown = Device("a device", "cpu")
    assert predict(config_of(), unknown)["time"]["step_s"] is None
    lines = "\n".join(accounting.report(config_of(), unknown, predict(config_of(), unknown)))
    assert "unknown without the device's peak" in lines


# --- fitting


def test_the_largest_batch_fits_and_one_more_does_not():
    config = config_of()
    limit = 40 * 2**20
    largest = largest_batch(config, CPU, limit)
    assert largest > 1
    peaks = [Timeline(schedule(dataclasses.replace(config, batch_size=b), CPU)).peak for b in (largest, largest + 1)]
    assert peaks[0] <= limit < peaks[1]


@pytest.mark.parametrize("block_size, chunk", [(32, 32), (32, 100), (33, 32), (100, 32), (7, 5)])
def test_the_largest_batch_of_a_chunked_loss_fits_too(block_size, chunk):
    config = config_of(block_size=block_size, loss_chunk=chunk, vocab_size=3000)
    for limit in (30 * 2**20, 60 * 2**20):
        largest = largest_batch(config, CPU, limit)
        assert largest * block_size > chunk
        peaks = [
            Timeline(schedule(dataclasses.replace(config, batch_size=b), CPU)).peak for b in (largest, largest + 1)
        ]
        assert peaks[0] <= limit < peaks[1]


@pytest.mark.parametrize(
    "memory, words",
    [
        ("40MiB", "--batch_size=", ),
        ("1MiB", "batch size cannot help: parameters, gradients and optimizer state alone need"),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_the_way_out(memory, words):
    config = config_of(batch_size=500)
    with pytest.raises(ConfigError, match=words) as error:
        refuse_what_cannot_fit(config, CPU, predict(config, CPU, parse_memory(memory)))
    assert "\n" not in str(error.value) and "batch_size=500 needs" in str(error.value)


def test_not_even_one_sequence_fits_though_the_states_do():
    config = config_of(block_size=2048, n_embd=16, vocab_size=300)
    states = 16 * predict(config, CPU)["model"]["params"]
    with pytest.raises(ConfigError, match="not even --batch_size=1 fits"):
        refuse_what_cannot_fit(config, CPU, predict(config, CPU, states + 2**16))


@pytest.mark.parametrize("text", ["39.5", "lots", "-1GiB", "0GiB", "GiB", "infGiB", "3TB "])
def test_a_size_without_a_unit_is_refused(text, capsys):
    assert accounting.main(["--vocab_size=65", f"--memory={text}"]) == 2
    assert "39.5GiB" in capsys.readouterr().err


def test_sizes_with_units():
    assert (parse_memory("39.5GiB"), parse_memory("40GB"), parse_memory(None)) == (42_412_802_048, 40 * 10**9, None)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--gpu=h100-smx", "--vocab_size=65"], "h100-sxm"),
        (["--mfu=1.5", "--vocab_size=65"], "--mfu=1.5"),
        (["--dtype=bfloat16", "--gpu=v100", "--vocab_size=65"], "has no bfloat16"),
        (["--dataset=no-such-corpus"], "data/prepare.py no-such-corpus"),
        (["--n_head=5", "--vocab_size=65"], "n_head=5"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, words, capsys):
    assert accounting.main(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_the_report_names_the_peak_and_its_reason(capsys):
    assert accounting.main([str(ROOT / "configs" / "gpt2.py"), "--gpu=a100-40gb"]) == 0
    printed = capsys.readouterr().out
    assert (
        "124,373,760" in printed
        and "in forward, chunk's logits into their gradient" in printed
        and "as PaLM counts it" in printed
    )


def test_a_command_is_answered_at_once():
    """In seconds of the processor, which another process's load does not lengthen."""
    config = ROOT / "configs" / "published" / "llama3_405b.py"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, ROOT / "accounting.py", config, "--gpu=h100-sxm", "--n_gpus=16384", "--json"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.3


def test_a_preflight_is_printed_at_once():
    """In seconds of the processor: what stands before a run's first step, measuring left out."""
    config = resolve(Config(**read_file(ROOT / "configs" / "gpt2_xl.py")), CPU)
    start = time.process_time()
    assert len(list(accounting.report(config, CPU, predict(config, CPU)))) > 15
    assert time.process_time() - start < 0.1


def test_a_cpu_takes_attention_in_bfloat16_where_tiles_can_compute_it():
    """Not so with dropout of its weights, nor behind the cache of generation: those are torch's, in float32 there."""
    gpu, config = accelerator("a100-40gb"), config_of(dtype="bfloat16")
    dropped = config_of(dtype="bfloat16", attn_dropout=0.1)

    def dtypes(ops):
        return {op.output.dtype for op in ops if op.is_attention}

    assert dtypes(schedule(config, gpu).ops) == dtypes(schedule(config, CPU).ops) == {"bfloat16"}
    assert dtypes(schedule(dropped, gpu).ops) == {"bfloat16"} and dtypes(schedule(dropped, CPU).ops) == {"float32"}
    assert dtypes(generation(config, gpu, 1, 4, 0).ops) == {"bfloat16"}
    assert dtypes(generation(config, CPU, 1, 4, 0).ops) == {"float32"}
    for c in (config, dropped):  # the model agrees with the schedule: what it keeps is what that says
        assert sorted(saved_by_torch(Step(c))) == sorted(saved_by_schedule(c))


# --- a card by hand, and what is on a card besides


def test_a_card_is_given_by_hand(capsys):
    words = ["--vocab_size=65", "--n_layer=2", "--json"]
    assert accounting.main([*words, "--peak_flops=5e14", "--bandwidth=2e12", "--memory=64GB", "--mfu=0.5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["time"]["step_s"] == printed["flops"]["per_step"] / (5e14 * 0.5)
    assert printed["memory"]["available"] == 64 * 10**9 and printed["roofline"]["ridge"] == 250
    assert accounting.main([*words, "--gpu=h100-sxm", "--peak_flops=8e14"]) == 0  # measured on it, say
    printed = json.loads(capsys.readouterr().out)
    assert printed["time"]["peak_flops"] == 8e14 and printed["memory"]["available"] == 80 * 10**9
    for flag in ("--peak_flops=0", "--bandwidth=-1", "--peak_flops=1e30"):
        assert accounting.main([*words, flag]) == 2
        assert flag.split("=")[0] in capsys.readouterr().err


def test_what_a_card_holds_beside_the_tensors_is_named_apart():
    a100 = accelerator("a100-40gb")
    memory = predict(config_of(), a100)["memory"]
    assert list(memory["card"]) == ["allocator rounding", "cuBLAS workspace", "CUDA context", "fragmentation"]
    t = Timeline(schedule(config_of(), a100))
    rounded = sum(-(-b.bytes // 512) * 512 * count for b, count in t.alive(t.peak_op))
    assert memory["card"]["allocator rounding"] == (rounded - memory["peak"],) * 2
    assert memory["pinned_host"] == 2 * 2 * 8 * 3 * 32
    lines = "\n".join(accounting.report(config_of(), a100, predict(config_of(), a100)))
    assert "as estimated" in lines and "fragmentation" in lines and "pinned host memory" in lines
    assert predict(config_of(), CPU)["memory"]["card"] is None and "as estimated" not in "\n".join(
        accounting.report(config_of(), CPU, predict(config_of(), CPU))
    )
