"""Bytes, intensity and bounds against what can be worked out by hand, generation's FLOPs against torch's counter."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import accounting
from cli.errors import ConfigError
from config import Config, resolve
from estimate import roofline
from estimate.predict import predict
from estimate.step import generation_step, training_step
from estimate.tape import Buffer, Op, Tape
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec
from model import KVCache, build

H100 = accelerator("h100-sxm")
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
SHAPES = {
    "gpt2": {"bias": True},
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    "qk_norm, relu2": {"pos": "rope", "qk_norm": True, "activation": "relu2", "head_dim": 24, "n_kv_head": 1},
    "mlp": {"model": "mlp"},
}


def config_of(spec=H100, **settings):
    return resolve(Config(**{**SMALL, **settings}), spec)


def totals(ops):
    return sum(op.flops * op.times for op in ops), sum(op.bytes * op.times for op in ops)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new, past", [(1, 0), (1, 9), (5, 0), (4, 7)])
def test_flops_of_generation_equal_what_torch_counts(shape, new, past):
    config = config_of(dtype="float32", **SHAPES[shape])
    with torch.device("meta"):
        model = build(config).eval()
    cache = None
    if config.model == "transformer":
        cache = KVCache(config, 3, "meta")
        cache.length = past
    idx = torch.zeros(3, new, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model.hidden(idx, cache)[:, -1])
    assert counter.get_total_flops() == totals(generation_step(config, H100, 3, new, past).ops)[0]


def test_a_square_matmul_in_16_bits_has_a_third_of_its_size_as_intensity():
    config = config_of(n_embd=4096, batch_size=2, block_size=2048, dtype="bfloat16")
    tape = Tape(config, H100)
    x = tape.cast(tape.param("x", 4096, 4096), "bfloat16")
    tape.linear("square", x, 4096)
    (op,) = (op for op in tape.ops if op.matmuls)
    assert op.flops / op.bytes == 4096 / 3  # 2 n^3 over 3 n^2 of 2 bytes: 1365


def test_the_ridge_of_an_h100():
    assert round(roofline.roofline(config_of(), H100)["ridge"]) == 295


def test_an_operation_takes_the_longer_of_its_two_bounds():
    thousand = Buffer("x", (1000,), "float32")
    by_compute = Op("a", "", "", (), (), ((1, 100, 100, 100),))
    by_memory = Op("b", "", "", (), (thousand,), ((1, 10, 10, 10),))
    assert by_compute.least_seconds(1e6, 1e3) == 2.0 and by_memory.least_seconds(1e6, 1e3) == 4.0


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_add_up_to_the_step(shape):
    config = config_of(gradient_accumulation_steps=5, **SHAPES[shape])
    result = roofline.roofline(config, H100)
    assert result["total"]["flops"] == predict(config, H100)["flops"]["per_step"]
    assert math.isclose(result["total"]["seconds"], sum(row["seconds"] for row in result["step"]))
    bounds = result["total"]["flops"] / H100.peak("bfloat16"), result["total"]["bytes"] / H100.bandwidth
    assert max(bounds) * (1 - 1e-9) <= result["total"]["seconds"] <= sum(bounds) * (1 + 1e-9)
    assert math.isclose(result["total"]["seconds"], predict(config, H100)["time"]["least_s"])


def test_training_is_bound_by_compute_and_decoding_by_memory_for_a_wide_model():
    config = config_of(n_layer=2, n_head=32, n_embd=4096, block_size=2048, batch_size=8, vocab_size=32000)
    result = roofline.roofline(config, H100)
    mlp = [row for row in result["step"] if row["group"] == "mlp"]
    assert {row["bound"] for row in mlp} == {"compute"} and result["prefill"]["intensity"] > result["ridge"]
    assert result["decode"][0]["intensity"] < 2 and {row["bound"] for row in result["decode"]} == {"memory"}


def test_the_batch_from_which_decoding_is_bound_by_compute_is_the_least():
    config = config_of(n_head=32, n_embd=4096, block_size=128, vocab_size=32000)
    least = roofline.compute_bound_batch(config, H100, past=127)
    ridge = H100.peak("bfloat16") / H100.bandwidth
    before, then = (roofline.inference(config, H100, 1, 127, b)[1]["intensity"] for b in (least - 1, least))
    assert before < ridge <= then and ridge < least < 1.5 * ridge  # for a wide layer it is near the ridge itself


def test_attention_over_the_cache_has_the_same_intensity_at_any_batch():
    config = config_of(n_kv_head=2)
    for batch_size in (1, 64):
        (op, *_) = (op for op in generation_step(config, H100, batch_size, 1, 1000).ops if op.is_attention)
        assert math.isclose(op.flops / op.bytes, 2, rel_tol=0.02)  # 4 H D S over 2 x 2 K D S bytes, with H / K = 2


@pytest.mark.parametrize("kv, dtype, n_bytes", [(4, "bfloat16", 512), (1, "bfloat16", 128), (4, "float32", 1024)])
def test_cache_bytes_per_token(kv, dtype, n_bytes):
    config = config_of(n_kv_head=kv, dtype=dtype)  # 2 L K D elements: 2 x 2 x kv x 16
    assert predict(config, H100)["memory"]["kv_cache_per_token"] == n_bytes
    caches = [b for b in generation_step(config, H100, 3, 1, 9).persistent if b.kind == "cache"]
    assert sum(b.bytes for b in caches) == n_bytes * 3 * 10


def test_a_lookup_reads_its_rows_and_not_the_table():
    small, large = (generation_step(config_of(vocab_size=v), H100, 1, 1, 0).ops[0].bytes for v in (300, 30_000))
    assert small == large == 2 * 64 * 4 + 8


def test_on_a_cpu_a_single_row_reads_the_weights_in_float32():
    cpu = DeviceSpec("a CPU", "cpu", 2**34, {"bfloat16": 1e12}, 1e10, "a test", ("float32", "bfloat16"))
    config = config_of(cpu, dtype="bfloat16")

    def weight_bytes(batch_size, spec):
        (op,) = (op for op in generation_step(config, spec, batch_size, 1, 9).ops if op.name == "logits")
        (weight,) = (b for b in op.reads if b.numel == config.vocab_size * config.n_embd)
        return weight.bytes / weight.numel

    assert (weight_bytes(1, cpu), weight_bytes(2, cpu), weight_bytes(1, H100)) == (4, 2, 2)


def test_the_command_prints_groups_and_generation(capsys):
    argv = ["--gpu=a100-40gb", "--roofline", *(f"--{name}={value}" for name, value in SMALL.items())]
    assert accounting.main(argv) == 0
    printed = capsys.readouterr().out
    for words in ("ridge at 201 FLOP/byte", "forward attention", "backward loss", "optimizer", "decode, batch 512"):
        assert words in printed, words


@pytest.mark.parametrize(
    "spec, words",
    [
        (DeviceSpec("a card", "cuda", bandwidth=1e12), "the peak of a card in float32 is not known"),
        (DeviceSpec("a card", "cuda", peak_flops={"float32": 1e12}), "the memory bandwidth of a card is not known"),
    ],
)
def test_what_is_not_known_is_not_guessed(spec, words):
    with pytest.raises(ConfigError, match=words):
        roofline.roofline(config_of(spec, dtype="float32"), spec)


def test_operations_add_up_to_their_groups_and_the_batch_travels_beside_them():
    config = config_of(n_layer=9, gradient_accumulation_steps=3)
    result = roofline.roofline(config, H100)
    for key in ("flops", "bytes"):
        for group in result["step"]:
            parts = [r for r in result["operations"] if (r["phase"], r["group"]) == (group["phase"], group["group"])]
            assert sum(part[key] for part in parts) == group[key]
    labels = [(row["phase"], row["label"]) for row in result["operations"]]
    assert len(set(labels)) == len(labels) and ("backward", "mlp.up gradient") in labels
    assert not any("blocks." in label for _, label in labels)
    copy = result["batch_copy"]
    assert copy["bytes"] == 3 * 2 * 8 * config.batch_size * config.block_size
    assert copy["seconds"] == copy["bytes"] / 63e9
    assert "batch_copy" not in roofline.roofline(config, DeviceSpec("x", "cpu", None, {"bfloat16": 1e12}, 1e11))


def test_views_move_nothing_and_the_gradients_norm_reads_them_once():
    config = config_of(gradient_accumulation_steps=1)
    s = training_step(config, H100)
    assert {op.bytes for op in s.ops if op.name.startswith("split")} == {0}
    norms = [op for op in s.ops if op.kind == "gradient norm"]
    assert sum(op.bytes for op in norms) == 4 * predict(config, H100)["model"]["params"] + 4 * len(norms)
