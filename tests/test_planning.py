"""The questions on top of the prediction: against published figures, against the prediction itself, and their words."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accounting
from cluster import korthikanti_activation_bytes, zero_bytes_per_gpu
from config import Config, ConfigError, read_file, resolve
from hardware import ACCELERATORS, Device, accelerator
from model import build
from optimizer import AdamW, parameter_groups
from planning import (
    Peaks,
    compare,
    compare_cards,
    compare_cards_lines,
    compare_lines,
    compute_optimal,
    gpt2_size,
    max_params,
    max_params_lines,
    napkin,
    napkin_lines,
    plan,
    plan_lines,
    remedies,
    remedies_lines,
    shape_for,
    training_costs,
)
from prediction import Timeline, predict
from schedule import schedule

ROOT = Path(__file__).resolve().parents[1]
GPT2 = Config(**read_file(ROOT / "configs" / "gpt2.py"))
H100, V100, RTX4090 = accelerator("h100-sxm"), accelerator("v100"), accelerator("rtx4090")
CPU = Device("a CPU", "cpu", 2**34, {"float32": 2e11}, source="a test")
SMALL = Config(n_layer=2, n_head=4, n_embd=64, block_size=32, vocab_size=300, batch_size=12, dtype="float32",
               gradient_accumulation_steps=3)  # fmt: skip
UNKNOWN = Device("a device", "cpu")


def peak(config, device):
    return Timeline(schedule(config, device)).peak


def changed(config, remedy):
    return replace(config, **remedy["changes"])


# --- on the back of a napkin


def test_llama_70b_on_1024_cards_takes_143_9_days():
    """Stanford CS336's question; its 143.93 days are with 989.5 TFLOP/s, where the vendor's whitepaper has 989.4."""
    result = napkin(70e9, 15e12, H100, n_gpus=1024, mfu=0.5, price_per_gpu_hour=2)
    assert result["flops"] == 6.3e24
    assert round(result["days"], 1) == 143.9 and round(result["days"], 2) == 143.94
    rounded_up = replace(H100, peak_flops={"bfloat16": 989.5e12})
    assert round(napkin(70e9, 15e12, rounded_up, n_gpus=1024, mfu=0.5)["days"], 2) == 143.93
    assert math.isclose(result["gpu_hours"], 1024 * 24 * result["days"])
    assert result["price"] == 2 * result["gpu_hours"]
    lines = "\n".join(napkin_lines(result, H100, 1024, 0.5))
    assert "143.9 days" in lines and "3,537,497 GPU-hours" in lines and "7,074,994.95" in lines


def test_8b_parameters_on_1024_cards_of_a_petaflop_take_20_35_days():
    card = Device("a card", "cuda", peak_flops={"bfloat16": 1e15}, dtypes=("float32", "bfloat16"))
    result = napkin(8e9, 15e12, card, n_gpus=1024, mfu=0.4)
    assert round(result["days"], 2) == 20.35
    assert result["price"] is None and "price" not in "\n".join(napkin_lines(result, card, 1024, 0.4))


def test_a_card_without_bfloat16_is_taken_at_its_float16_peak():
    assert napkin(1e9, 1e9, V100, mfu=1)["seconds"] == 6e18 / 125e12


def test_eight_h100_hold_40e9_parameters():
    assert max_params(H100, n_gpus=8, bytes_per_param=16) == 40_000_000_000
    assert max_params(H100, memory_bytes=16 * 5 + 15) == 5
    assert "40 G at most: 16 bytes each" in next(max_params_lines(40e9, 16))


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda: napkin(-1, 1, H100), "params=-1"),
        (lambda: napkin(1, math.nan, H100), "tokens=nan"),
        (lambda: napkin(1, 1e25, H100), "tokens=1e+25"),
        (lambda: napkin(1, 1, H100, n_gpus=0), "n_gpus=0"),
        (lambda: napkin(1, 1, H100, mfu=1.5), "mfu=1.5 must lie in (0, 1]"),
        (lambda: napkin(1, 1, H100, price_per_gpu_hour=-2), "price_per_gpu_hour=-2"),
        (lambda: napkin(1, 1, accelerator("a10g")), "its bfloat16 peak is unknown"),
        (lambda: max_params(H100, bytes_per_param=0), "bytes_per_param=0"),
        (lambda: max_params(accelerator("b300")), "its memory is unknown; give --memory"),
        (lambda: compare_cards(GPT2, mfu=0), "mfu=0"),
        (lambda: remedies(resolve(SMALL, UNKNOWN), UNKNOWN), "its memory is unknown"),
        (lambda: plan(RTX4090, -1), "hours=-1"),
        (lambda: plan(RTX4090, 1e-4), "plan for more hours"),
        (lambda: plan(RTX4090, 24, memory_bytes=2**26), "64.0 MiB have no room"),
        (lambda: plan(accelerator("gb300"), 24), "its memory is unknown"),
        (lambda: zero_bytes_per_gpu(1e9, 8, 4), "stage=4"),
        (lambda: zero_bytes_per_gpu(1e9, 0, 3), "n_gpus=0"),
        (lambda: korthikanti_activation_bytes(2048, 1, 128, 8, recompute="some"), "recompute='some'"),
        (lambda: korthikanti_activation_bytes(2048, 1, 128, 8, t=0), "t=0"),
    ],
)
def test_mistakes_are_one_line(ask, words):
    with pytest.raises(ConfigError) as error:
        ask()
    assert words in str(error.value) and "\n" not in str(error.value)


# --- what fits


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
@pytest.mark.parametrize("device, dtype", [(CPU, "float32"), (CPU, "bfloat16"), (H100, "bfloat16")])
@pytest.mark.parametrize("shape", LINEAR)
def test_the_peak_at_any_batch_size_follows_from_two(shape, device, dtype, accumulation):
    settings = {"dtype": dtype, "gradient_accumulation_steps": accumulation, **LINEAR[shape]}
    config = resolve(replace(SMALL, **settings), device)
    peaks = Peaks(config, device)
    for batch_size in (1, 2, 3, 17, 200):
        assert peaks.at(batch_size) == peak(replace(config, batch_size=batch_size), device)
    for batch_size in (1, 2, 5, 200):
        exactly = peaks.at(batch_size)
        assert peaks.largest(exactly) == batch_size
        assert peaks.largest(exactly - 1) == batch_size - 1


def test_what_fits_needs_no_remedy():
    result = remedies(resolve(SMALL, CPU), CPU)
    assert result["fits"] is True and result["remedies"] == [] and result["sharded"] is None
    assert "none is needed" in "\n".join(remedies_lines(result, CPU))


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
            largest = Peaks(variant, V100).largest(memory)
            assert variant.batch_size <= largest < config.batch_size and largest <= 2 * variant.batch_size
        if "block_size" in remedy["changes"]:
            longer = replace(variant, block_size=2 * variant.block_size)
            if variant.batch_size < config.batch_size:
                longer = replace(longer, batch_size=1)
            assert peak(longer, V100) > memory


def test_a_shorter_context_is_the_way_where_not_even_one_sequence_fits():
    """Or recomputation; without it there is one way, and one more where the loss may come in chunks."""

    def without_recomputation(config, memory):
        return [r for r in remedies(config, CPU, memory)["remedies"] if "recompute" not in r["changes"]]

    config = resolve(replace(SMALL, batch_size=2, block_size=1024, pos="rope"), CPU)
    memory = peak(replace(config, batch_size=1), CPU) - 1
    (only,) = without_recomputation(config, memory)
    assert only["changes"] == {"block_size": 512, "gradient_accumulation_steps": 6}
    plain, chunks = without_recomputation(replace(config, batch_size=1024), memory // 2)
    assert plain["changes"] == {"block_size": 256, "batch_size": 1, "gradient_accumulation_steps": 12288}
    shape = {"block_size": 512, "batch_size": 1, "gradient_accumulation_steps": 6144}
    assert chunks["changes"] == {"loss_chunk": 65536, **shape}  # so many logits ask for chunks


def test_the_micro_batch_divides_the_sequences_of_a_step_where_one_does():
    config = resolve(replace(SMALL, batch_size=12, gradient_accumulation_steps=3), CPU)
    peaks = Peaks(config, CPU)
    for largest, expected in ((11, 9), (9, 9), (8, 6), (5, 4), (1, 1)):
        (best, *_) = remedies(config, CPU, peaks.at(largest))["remedies"]
        assert best["changes"] == {"batch_size": expected, "gradient_accumulation_steps": 36 // expected}
        assert best["flops_ratio"] == best["time_ratio"] == 1


def test_a_prime_number_of_sequences_is_met_as_nearly_as_possible():
    config = resolve(replace(SMALL, batch_size=37, gradient_accumulation_steps=1), CPU)
    several = replace(config, gradient_accumulation_steps=2)
    (best, *_) = remedies(config, CPU, Peaks(several, CPU).at(22))["remedies"]
    assert (
        best["changes"] == {"batch_size": 19, "gradient_accumulation_steps": 2} and best["tokens_per_step"] == 38 * 32
    )


def test_a_further_micro_step_costs_the_gradients_it_keeps():
    config = resolve(replace(SMALL, n_embd=256, batch_size=20, gradient_accumulation_steps=1), CPU)
    memory = peak(replace(config, batch_size=10), CPU)
    assert peak(replace(config, batch_size=10, gradient_accumulation_steps=2), CPU) > memory
    found = remedies(config, CPU, memory)["remedies"]
    assert found[0]["changes"]["batch_size"] < 10 and all(peak(changed(config, r), CPU) <= memory for r in found)


def test_an_mlps_context_is_never_shorter_than_its_window():
    config = resolve(replace(SMALL, model="mlp", mlp_context=8, block_size=16, batch_size=1, vocab_size=3000), CPU)
    blocks = {size: peak(replace(config, block_size=size), CPU) for size in (8, 4)}
    assert {r["changes"]["block_size"] for r in remedies(config, CPU, blocks[8])["remedies"]} == {8}
    assert remedies(config, CPU, blocks[4])["remedies"] == []


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
    without_half = remedies(resolve(replace(SMALL, batch_size=500), CPU), CPU, 2**25)["remedies"]
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
    assert not result["remedies"] and "batch size cannot help" in lines and f"over {n} such cards" in lines


def test_states_that_fit_but_for_nothing_beside_them():
    config = resolve(replace(SMALL, block_size=1, pos="rope", vocab_size=3000), CPU)
    result = remedies(config, CPU, 16 * predict(config, CPU)["model"]["params"] + 64)
    lines = "\n".join(remedies_lines(result, CPU))
    assert not result["remedies"] and "none: no batch_size, precision or block_size" in lines


# --- which card


def test_every_card_is_compared_each_in_its_own_dtype():
    gpt2 = replace(GPT2, dropout=0.1)  # whose masks differ between kinds of device
    rows = compare_cards(gpt2, mfu=0.4)
    by_name = {r["name"]: r for r in rows}
    assert set(by_name) == set(ACCELERATORS) and len(rows) == len(ACCELERATORS)
    for name in ("v100-sxm-16gb", "a100-40gb", "rtx4090", "mi300x", "tpu-v4"):
        device, row = accelerator(name), by_name[name]
        config = resolve(gpt2, device)
        prediction = predict(config, device, mfu=0.4)
        assert row["dtype"] == config.dtype
        assert row["step_s"] == prediction["time"]["step_s"] and row["fits"] is prediction["fits"]
        assert math.isclose(row["days"] * 86400, prediction["time"]["total_s"])
        sizes = [replace(config, batch_size=row["largest_batch"] + more) for more in (0, 1)]
        assert peak(sizes[0], device) <= device.memory_bytes < peak(sizes[1], device)
    assert by_name["v100-sxm-16gb"]["dtype"] == "float16"


def test_cards_that_fit_come_first_and_the_fastest_of_them():
    rows = compare_cards(replace(GPT2, batch_size=40), mfu=0.4)
    fits = [r["fits"] for r in rows]
    assert fits == sorted(fits, key=[True, None, False].index) and set(fits) == {True, None, False}
    steps = [r["step_s"] for r in rows if r["fits"] and r["step_s"]]
    assert steps == sorted(steps) and len(steps) > 10


def test_cards_where_no_batch_fits_come_last():
    rows = compare_cards(replace(GPT2, n_layer=48, n_embd=1536, batch_size=1000), mfu=0.4)
    none_fits = [r["largest_batch"] == 0 for r in rows]
    assert none_fits == sorted(none_fits) and set(none_fits) == {True, False}


def test_what_is_unknown_is_printed_as_such():
    rows = compare_cards(GPT2)
    lines = {line.split()[0]: line for line in compare_cards_lines(rows, 0.4)}
    assert lines["a10g"].count("n/a") == 2  # no peak: neither a step nor the run
    assert lines["b300"].count("n/a") == 3  # no memory: nor whether it fits, nor how much
    assert "n/a" not in lines["h100-sxm"]
    assert "at an assumed 40% of its peak" in lines["one"]


def test_a_card_that_lacks_the_dtype_takes_its_own():
    by_name = {r["name"]: r["dtype"] for r in compare_cards(replace(GPT2, dtype="bfloat16"))}
    assert (by_name["t4"], by_name["a100-40gb"]) == ("float16", "bfloat16")
    assert {r["dtype"] for r in compare_cards(replace(GPT2, dtype="float32"))} == {"float32"}


def test_all_cards_are_compared_at_once():
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        compare_cards(GPT2)
        best = min(best, time.perf_counter() - start)
    assert best < 1


# --- the best use of a budget


# budget, parameters, tokens of Hoffmann et al. 2022, table 3 (approach 1)
CHINCHILLA = [(1.92e19, 400e6, 8.0e9), (1.21e20, 1e9, 20.2e9), (1.23e22, 10e9, 205.1e9), (5.76e23, 67e9, 1.5e12),
              (3.85e24, 175e9, 3.7e12)]  # fmt: skip


@pytest.mark.parametrize("flops, n_params, n_tokens", CHINCHILLA)
def test_the_law_is_chinchillas(flops, n_params, n_tokens):
    params, tokens = compute_optimal(flops)
    assert math.isclose(params, n_params, rel_tol=0.05) and math.isclose(tokens, n_tokens, rel_tol=0.08)
    assert math.isclose(6 * params * tokens, flops)


@pytest.mark.parametrize("n_layer, n_embd", [(1, 32), (12, 768), (48, 1600)])
def test_the_closed_form_is_the_schedules(n_layer, n_embd):
    config = resolve(Config(n_layer=n_layer, n_embd=n_embd, n_head=n_embd // 32, vocab_size=50304), H100)
    prediction = predict(config, H100)
    n_params, per_token, blocks = gpt2_size(n_layer, n_embd)
    assert (n_params, per_token) == (prediction["model"]["params"], prediction["flops"]["per_token"])
    assert per_token - blocks == 6 * n_embd * 50304


@pytest.mark.parametrize("exponent", range(16, 25))
def test_a_shape_of_any_budget_costs_that_budget(exponent):
    n_layer, n_embd = shape_for(10.0**exponent)
    assert math.isclose(training_costs()[n_layer, n_embd], 10.0**exponent, rel_tol=0.05)
    assert exponent < 18 or 32 <= n_embd / n_layer <= 128


def load_plan(result, folder):
    path = folder / "plan.py"
    path.write_text("\n".join(plan_lines(result)) + "\n", encoding="utf-8")
    return Config(**read_file(path))


@pytest.mark.parametrize("card, hours", [("rtx4090", 24), ("h100-sxm", 24), ("v100", 2), ("a100-40gb", 0.1)])
def test_a_plan_fits_its_card_its_hours_and_the_law(card, hours, tmp_path):
    device = accelerator(card)
    result = plan(device, hours, mfu=0.4)
    config = resolve(load_plan(result, tmp_path), device)
    prediction = predict(config, device, mfu=0.4)
    assert prediction["memory"]["peak"] <= 0.95 * device.memory_bytes
    assert 0.99 < prediction["time"]["total_s"] / (3600 * hours) <= 1
    assert result["params"] == prediction["model"]["params"]
    assert result["tokens"] == config.max_iters * config.tokens_per_step
    assert abs(result["tokens"] / result["params"] / 20 - 1) < 0.05
    law_params, _ = compute_optimal(result["flops"])
    with_attention = law_params * math.sqrt(
        prediction["flops"]["six_nd_per_token"] / prediction["flops"]["per_token"]
    )  # as C = 20 N (FLOPs per token)
    assert math.isclose(result["params"], with_attention, rel_tol=0.03)
    assert config.lr_decay_iters == config.max_iters > config.warmup_iters and config.min_lr < config.learning_rate
    assert "Hoffmann et al. 2022" in result["config"] and "no room" not in result["config"]


def test_a_card_too_small_for_its_hours_gets_the_largest_model_that_fits(tmp_path):
    result = plan(RTX4090, 20000, mfu=0.4)
    config = resolve(load_plan(result, tmp_path), RTX4090)
    assert predict(config, RTX4090)["fits"] and result["tokens"] > 100 * result["params"]
    assert 0.7 < 16 * result["params"] / RTX4090.memory_bytes < 1
    assert "the card has no room for more" in result["config"]


def test_a_plans_batch_and_lr_follow_the_published_fit(tmp_path):
    """DeepSeek LLM's 0.2920 C^0.3271 tokens, 0.3118 C^-0.1250, C by the FLOPs outside the head."""
    result = plan(H100, 24)
    config = load_plan(result, tmp_path)
    _, per_token, blocks = gpt2_size(config.n_layer, config.n_embd)
    C = result["flops"] * blocks / per_token
    assert 2**-0.5 <= config.tokens_per_step / (0.2920 * C**0.3271) <= 2**0.5
    assert math.isclose(config.learning_rate, 0.3118 * C**-0.125, rel_tol=0.05)


def test_below_the_smallest_budget_of_the_fit_lr_stays(tmp_path):
    assert load_plan(plan(V100, 0.05), tmp_path).learning_rate == float(f"{0.3118 * 1e17**-0.125:.2g}")


def test_a_plan_leaves_room_beside_what_is_predicted_unless_told_the_memory(tmp_path):
    config = resolve(load_plan(plan(RTX4090, 24), tmp_path), RTX4090)
    exactly = peak(config, RTX4090)
    tight = replace(RTX4090, memory_bytes=exactly)
    assert load_plan(plan(tight, 24), tmp_path).batch_size < config.batch_size
    assert load_plan(plan(tight, 24, memory_bytes=exactly), tmp_path).batch_size == config.batch_size


def test_two_steps_of_a_plan_scaled_down(tmp_path):
    config = load_plan(plan(RTX4090, 24), tmp_path)
    small = replace(config, n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=100, batch_size=4)
    small = resolve(replace(small, dtype="float32"), CPU)
    model = build(small)
    model.init_weights(0)
    optimizer = AdamW(parameter_groups(model, small.weight_decay), small.learning_rate, (small.beta1, small.beta2))
    x, y = torch.randint(100, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(2):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert model(x, y).item() < losses[1] < losses[0]


# --- what a change would do


def test_a_config_compared_with_itself_differs_in_nothing():
    config = resolve(GPT2, H100)
    result = compare(config, config, H100)
    assert result["settings"] == {}
    assert len(result["figures"]) > 10 and all(d == 0 and a == b for a, b, d in result["figures"].values())
    assert not any("%" in line for line in compare_lines(result))


def test_a_change_is_shown_in_settings_and_figures():
    config = resolve(GPT2, H100)
    other = replace(config, batch_size=6, gradient_accumulation_steps=80)
    result = compare(config, other, H100, mfu=0.5)
    assert result["settings"] == {"batch_size": (12, 6), "gradient_accumulation_steps": (40, 80)}
    figures = result["figures"]
    assert figures["peak, bytes"] == (
        peak(config, H100),
        peak(other, H100),
        peak(other, H100) - peak(config, H100),
    )
    assert figures["FLOPs a step"][2] == figures["a step"][2] == figures["parameters"][2] == 0
    assert figures["a step"][0] == predict(config, H100, mfu=0.5)["time"]["step_s"]
    lines = "\n".join(compare_lines(result))
    assert "batch_size: 12 -> 6" in lines and "-50.0%" in lines


def test_a_comparison_without_a_known_peak_has_no_times():
    result = compare(resolve(SMALL, UNKNOWN), resolve(SMALL, UNKNOWN), UNKNOWN)
    assert result["figures"]["a step"] == (None, None, None)
    assert sum("n/a" in line for line in compare_lines(result)) == 2


# --- published formulas


def test_zero_divides_7_5b_parameters_over_64_cards():
    """Rajbhandari et al. 2020, figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    assert [zero_bytes_per_gpu(7.5e9, 64, stage) / 1e9 for stage in range(4)] == [120, 31.40625, 16.640625, 1.875]
    assert len({zero_bytes_per_gpu(1e9, 1, stage) for stage in range(4)}) == 1


# s, b, h, a, layers of the models in Korthikanti et al. 2022, table 3
MEGATRON = {"22B": (2048, 4, 6144, 64, 48), "175B": (2048, 1, 12288, 96, 96), "530B": (2048, 1, 20480, 128, 105),
            "1T": (2048, 1, 25600, 160, 128)}  # fmt: skip
# GB per card at t = 8 by the formulas of table 2: TP; TP, SP; TP, selective; all three; full
ACTIVATIONS = {"22B": (63.6, 42.5, 31.4, 10.27, 4.83), "175B": (55.6, 34.4, 31.4, 10.27, 4.83),
               "530B": (92.5, 54.0, 57.3, 18.72, 8.81), "1T": (140.9, 82.2, 87.2, 28.52, 13.42)}  # fmt: skip


@pytest.mark.parametrize("name", MEGATRON)
def test_activations_of_megatron_by_korthikantis_formulas(name):
    variants = [(False, "none"), (True, "none"), (False, "selective"), (True, "selective"), (False, "full")]
    for (sequence_parallel, recompute), expected in zip(variants, ACTIVATIONS[name], strict=True):
        n_bytes = korthikanti_activation_bytes(
            *MEGATRON[name], t=8, sequence_parallel=sequence_parallel, recompute=recompute
        )
        assert math.isclose(n_bytes / 1e9, expected, rel_tol=0.002)


@pytest.mark.parametrize("name, share", [("175B", 80), ("530B", 64)])
def test_scores_are_5as_over_h_of_34(name, share):
    """The paper's section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG 530B."""
    s, b, h, a, _ = MEGATRON[name]
    whole = korthikanti_activation_bytes(s, b, h, a)
    assert whole == s * b * h * (34 + share)
    assert whole - korthikanti_activation_bytes(s, b, h, a, recompute="selective") == s * b * h * share


def test_the_formulas_for_large_models_do_not_hold_for_small_ones():
    """sbh(34 + 5as/h) a layer leaves out the loss, most of what GPT-2 124M keeps; fused attention keeps no scores."""
    config = resolve(replace(GPT2, batch_size=4, loss_chunk=None), H100)
    theirs = korthikanti_activation_bytes(1024, 4, 768, 12, n_layer=12, recompute="selective")
    memory = predict(config, H100)["memory"]
    assert memory["loss"] > theirs and 1 < memory["activations"] / theirs < 1.25


# --- what it loads


def test_planning_loads_neither_torch_nor_numpy():
    code = "import sys, planning; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--params=1e9"], "--params and --tokens go together"),
        (["--plan", "--compare"], "--plan and --compare are questions of their own"),
        (["--explain", "--vs=x.py"], "--vs and --explain are questions of their own"),
        (["--n_gpus=8", "--plan"], "--n_gpus does not go with --plan"),
        (["--gpu="], "--gpu="),
        (["--vs="], "cannot be read"),
    ],
)
def test_questions_that_do_not_go_together_are_refused(words, message, capsys):
    assert accounting.main(["--vocab_size=65", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_flags_go_for_both_of_two_configs(tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text("n_layer = 4\nbatch_size = 99\n", encoding="utf-8")
    argv = ["--vocab_size=65", "--n_layer=2", "--batch_size=3", f"--vs={other}", "--gpu=t4", "--json"]
    assert accounting.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {}  # each of its settings is overridden


def test_a_loss_in_chunks_is_a_remedy_where_all_logits_were_asked_for():
    config = resolve(replace(GPT2, batch_size=40, loss_chunk=None), RTX4090)
    (best, *_) = remedies(config, RTX4090)["remedies"]
    assert best["changes"] == {"loss_chunk": 512} and best["peak"] == peak(changed(config, best), RTX4090)
    assert best["flops_ratio"] == 1 and best["tokens_per_step"] == config.tokens_per_step
