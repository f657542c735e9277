"""What fits: the peak at any batch size, the largest batch, and the changes that make a config fit."""

import math
from dataclasses import replace

import pytest

from cli.units import parse_memory
from config import Config, resolve
from estimate.fit import PeakByBatch, largest_batch, refuse_what_cannot_fit, remedies, remedies_lines
from estimate.predict import predict
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec
from tests.estimate.helpers import CPU, GPT2, UNKNOWN, config_of, message_of, peak

H100, V100, RTX4090 = accelerator("h100-sxm"), accelerator("v100"), accelerator("rtx4090")
OLD_CPU = DeviceSpec("a CPU without bfloat16 matmuls", "cpu", 2**34, {"float32": 2e11}, source="a test")
SMALL = Config(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=300, batch_size=12, dtype="float32",
               gradient_accumulation_steps=3)  # fmt: skip
LINEAR = {
    "gpt2": {},
    "untied, bias, dropout": {"tie_weights": False, "bias": True, "dropout": 0.1},
    "attn_dropout": {"attn_dropout": 0.1},
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "qk_norm": True},
    "mlp": {"model": "mlp"},
    "wide, few tokens": {"n_embd": 256, "block_size": 8, "vocab_size": 20},
    "the peak in attention": {"n_layer": 1, "block_size": 1024},
    "the peak in attention, recomputed": {
        "n_layer": 1,
        "block_size": 4096,
        "recompute": "attention",
        "loss_chunk": None,
    },
    "the peak in attention, chunked loss": {"n_layer": 1, "block_size": 1024, "loss_chunk": 3000},
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("spec, dtype", [(OLD_CPU, "float32"), (OLD_CPU, "bfloat16"), (H100, "bfloat16")])
@pytest.mark.parametrize("shape", LINEAR)
def test_the_peak_at_any_batch_size_follows_from_two(shape, spec, dtype, accumulation):
    settings = {"dtype": dtype, "gradient_accumulation_steps": accumulation, **LINEAR[shape]}
    config = resolve(replace(SMALL, **settings), spec)
    peaks = PeakByBatch(config, spec)
    for batch_size in (1, 2, 3, 17, 200):
        assert peaks.at(batch_size) == peak(replace(config, batch_size=batch_size), spec)
    for batch_size in (1, 2, 5, 200):
        exactly = peaks.at(batch_size)
        assert peaks.largest(exactly) == batch_size
        assert peaks.largest(exactly - 1) == batch_size - 1


def test_the_largest_batch_fits_and_one_more_does_not():
    config = config_of()
    limit = 40 * 2**20
    largest = largest_batch(config, CPU, limit)
    assert largest > 1
    fitting, too_large = (peak(replace(config, batch_size=b), CPU) for b in (largest, largest + 1))
    assert fitting <= limit < too_large


@pytest.mark.parametrize("block_size, chunk", [(32, 32), (32, 100), (33, 32), (100, 32), (7, 5)])
def test_the_largest_batch_of_a_chunked_loss_fits_too(block_size, chunk):
    config = config_of(block_size=block_size, loss_chunk=chunk, vocab_size=3000)
    for limit in (30 * 2**20, 60 * 2**20):
        largest = largest_batch(config, CPU, limit)
        assert largest * block_size > chunk
        fitting, too_large = (peak(replace(config, batch_size=b), CPU) for b in (largest, largest + 1))
        assert fitting <= limit < too_large


@pytest.mark.parametrize(
    "gpu, more_than, less_than, fits", [("h100-sxm", 74.51, 78.6, True), ("t4", 14.26, 14.9, False)]
)
def test_what_a_card_holds_is_what_cuda_reports_and_not_the_vendors_gb(gpu, more_than, less_than, fits):
    """With a GB as 10^9 bytes an H100 would hold 74.51 GiB, and it holds more; a T4 14.9 GiB, and it holds less."""
    spec = accelerator(gpu)
    config = resolve(GPT2, spec)
    config = replace(config, batch_size=largest_batch(config, spec, int(less_than * 2**30)))
    prediction = predict(config, spec)
    assert more_than * 2**30 < prediction["memory"]["peak"] <= less_than * 2**30
    assert prediction["fits"] is fits and remedies(config, spec)["fits"] is fits


# --- what is refused


@pytest.mark.parametrize(
    "memory, words",
    [
        ("40MiB", "--batch_size="),
        ("1MiB", "a smaller batch cannot help: parameters, gradients and optimizer state alone need"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_way_out(memory, words):
    config = config_of(batch_size=500)
    message = message_of(lambda: refuse_what_cannot_fit(config, CPU, predict(config, CPU, parse_memory(memory))))
    assert words in message and "batch_size=500 needs" in message


def test_not_even_one_sequence_fits_though_the_states_do():
    config = config_of(block_size=2048, n_embd=16, vocab_size=300)
    states = 16 * predict(config, CPU)["model"]["params"]
    message = message_of(lambda: refuse_what_cannot_fit(config, CPU, predict(config, CPU, states + 2**16)))
    assert "not even --batch_size=1 fits" in message


def test_without_a_known_memory_there_is_nothing_to_fit_into():
    config = resolve(SMALL, UNKNOWN)
    assert "its memory is unknown" in message_of(lambda: remedies(config, UNKNOWN))


# --- remedies


def changed(config, remedy):
    """Return the config as a remedy changes it."""
    return replace(config, **remedy["changes"])


def test_what_fits_needs_no_remedy():
    result = remedies(resolve(SMALL, OLD_CPU), OLD_CPU)
    assert result["fits"] is True and result["remedies"] == [] and result["sharded"] is None
    assert "none is needed" in "\n".join(remedies_lines(result, OLD_CPU))


@pytest.mark.parametrize("share", [0.2, 0.23, 0.3, 0.5, 0.8, 0.99])
def test_each_remedy_fits_and_nothing_smaller_was_needed(share):
    config = resolve(replace(SMALL, block_size=64), V100)
    memory = int(peak(config, V100) * share)
    result = remedies(config, V100, memory)
    assert result["fits"] is False and result["peak"] == peak(config, V100) and result["remedies"]
    assert len({str(r["changes"]) for r in result["remedies"]}) == len(result["remedies"])
    for remedy in result["remedies"]:
        variant = changed(config, remedy)
        assert remedy["peak"] == peak(variant, V100) <= memory
        assert remedy["tokens_per_step"] == variant.tokens_per_step
        assert abs(variant.tokens_per_step / config.tokens_per_step - 1) < 0.1
        if "batch_size" in remedy["changes"]:
            largest = PeakByBatch(variant, V100).largest(memory)
            assert variant.batch_size <= largest < config.batch_size and largest <= 2 * variant.batch_size
        if "block_size" in remedy["changes"]:
            longer = replace(variant, block_size=2 * variant.block_size)
            if variant.batch_size < config.batch_size:
                longer = replace(longer, batch_size=1)
            assert peak(longer, V100) > memory


def test_a_shorter_context_is_the_way_where_not_even_one_sequence_fits():
    """Or recomputation; without it there is one way, and one more where the loss may come in chunks."""

    def without_recomputation(config, memory):
        return [r for r in remedies(config, OLD_CPU, memory)["remedies"] if "recompute" not in r["changes"]]

    config = resolve(replace(SMALL, batch_size=2, block_size=1024, pos="rope"), OLD_CPU)
    memory = peak(replace(config, batch_size=1), OLD_CPU) - 1
    (only,) = without_recomputation(config, memory)
    assert only["changes"] == {"block_size": 512, "gradient_accumulation_steps": 6}
    plain, chunks = without_recomputation(replace(config, batch_size=1024), memory // 2)
    assert plain["changes"] == {"block_size": 256, "batch_size": 1, "gradient_accumulation_steps": 12288}
    shape = {"block_size": 512, "batch_size": 1, "gradient_accumulation_steps": 6144}
    assert chunks["changes"] == {"loss_chunk": 65536, **shape}  # so many logits ask for chunks


def test_the_micro_batch_divides_the_sequences_of_a_step_where_one_does():
    config = resolve(replace(SMALL, batch_size=12, gradient_accumulation_steps=3), OLD_CPU)
    peaks = PeakByBatch(config, OLD_CPU)
    for largest, expected in ((11, 9), (9, 9), (8, 6), (5, 4), (1, 1)):
        (best, *_) = remedies(config, OLD_CPU, peaks.at(largest))["remedies"]
        assert best["changes"] == {"batch_size": expected, "gradient_accumulation_steps": 36 // expected}
        assert best["flops_ratio"] == best["time_ratio"] == 1


def test_a_prime_number_of_sequences_is_met_as_nearly_as_possible():
    config = resolve(replace(SMALL, batch_size=37, gradient_accumulation_steps=1), OLD_CPU)
    several = replace(config, gradient_accumulation_steps=2)
    (best, *_) = remedies(config, OLD_CPU, PeakByBatch(several, OLD_CPU).at(22))["remedies"]
    assert best["changes"] == {"batch_size": 19, "gradient_accumulation_steps": 2}
    assert best["tokens_per_step"] == 38 * 32


def test_a_further_micro_step_costs_the_gradients_it_keeps():
    config = resolve(replace(SMALL, n_embd=256, batch_size=20, gradient_accumulation_steps=1), OLD_CPU)
    memory = peak(replace(config, batch_size=10), OLD_CPU)
    assert peak(replace(config, batch_size=10, gradient_accumulation_steps=2), OLD_CPU) > memory
    found = remedies(config, OLD_CPU, memory)["remedies"]
    assert found[0]["changes"]["batch_size"] < 10 and all(peak(changed(config, r), OLD_CPU) <= memory for r in found)


def test_an_mlps_context_is_never_shorter_than_its_window():
    config = resolve(replace(SMALL, model="mlp", mlp_context=8, block_size=16, batch_size=1, vocab_size=3000), OLD_CPU)
    blocks = {size: peak(replace(config, block_size=size), OLD_CPU) for size in (8, 4)}
    assert {r["changes"]["block_size"] for r in remedies(config, OLD_CPU, blocks[8])["remedies"]} == {8}
    assert remedies(config, OLD_CPU, blocks[4])["remedies"] == []


def test_half_precision_comes_first_where_it_is_faster_and_is_the_cards_own():
    config = resolve(replace(GPT2, dtype="float32", batch_size=64, gradient_accumulation_steps=8), V100)
    every = remedies(config, V100)["remedies"]
    found = [r for r in every if "recompute" not in r["changes"]]
    again = [r for r in every if "recompute" in r["changes"] and "block_size" not in r["changes"]]
    assert again and all(1.1 < r["flops_ratio"] < 4 / 3 for r in again)
    assert [r["changes"].get("dtype") for r in found] == ["float16", None, "float16", None]
    assert ["block_size" in r["changes"] for r in found] == [False, False, True, True]
    assert math.isclose(found[0]["time_ratio"], 15.7 / 125) and found[0]["flops_ratio"] == 1
    assert all(r["flops_ratio"] < 1 for r in found[2:])
    without_half = remedies(resolve(replace(SMALL, batch_size=500), OLD_CPU), OLD_CPU, 2**25)["remedies"]
    assert without_half and not any("dtype" in r["changes"] for r in without_half)


def test_an_unknown_peak_prices_in_flops_alone():
    config = resolve(replace(SMALL, batch_size=500), UNKNOWN)
    result = remedies(config, UNKNOWN, 2**25)
    assert result["remedies"] and all(r["time_ratio"] is None and r["step_s"] is None for r in result["remedies"])
    assert "the time" not in "\n".join(remedies_lines(result, UNKNOWN))


def test_batch_size_cannot_help_where_states_alone_are_too_large():
    config = resolve(replace(GPT2, n_layer=48, n_embd=4800), H100)
    result = remedies(config, H100)
    assert result["states"] == 16 * predict(config, H100)["model"]["params"] > H100.memory_bytes
    n = result["sharded"]["n_gpus"]
    assert result["states"] / n <= result["sharded"]["peak"] <= H100.memory_bytes
    lines = "\n".join(remedies_lines(result, H100))
    assert not result["remedies"] and "a smaller batch cannot help" in lines and f"over {n} such cards" in lines


def test_states_that_fit_but_for_nothing_beside_them():
    config = resolve(replace(SMALL, block_size=1, pos="rope", vocab_size=3000), OLD_CPU)
    result = remedies(config, OLD_CPU, 16 * predict(config, OLD_CPU)["model"]["params"] + 64)
    lines = "\n".join(remedies_lines(result, OLD_CPU))
    assert not result["remedies"] and "none: no batch_size, precision or block_size" in lines


def test_a_loss_in_chunks_is_a_remedy_where_all_logits_were_asked_for():
    config = resolve(replace(GPT2, batch_size=40, loss_chunk=None), RTX4090)
    (best, *_) = remedies(config, RTX4090)["remedies"]
    assert best["changes"] == {"loss_chunk": 512} and best["peak"] == peak(changed(config, best), RTX4090)
    assert best["flops_ratio"] == 1 and best["tokens_per_step"] == config.tokens_per_step
