"""Time and price of runs known only by their size, and planned runs, against published figures and the prediction."""

import math
from dataclasses import replace

import pytest
import torch

from cli.config_file import read_settings
from config import Config, resolve
from estimate.budget import (
    compute_optimal,
    gpt2_size,
    max_params,
    max_params_lines,
    napkin,
    napkin_lines,
    plan,
    plan_lines,
    shape_for,
    training_costs,
)
from estimate.predict import predict
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec
from model import build
from optimizer import AdamW, parameter_groups
from tests.estimate.helpers import CPU, message_of, peak

H100, V100, RTX4090 = accelerator("h100-sxm"), accelerator("v100"), accelerator("rtx4090")


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
    card = DeviceSpec("a card", "cuda", peak_flops={"bfloat16": 1e15}, dtypes=("float32", "bfloat16"))
    result = napkin(8e9, 15e12, card, n_gpus=1024, mfu=0.4)
    assert round(result["days"], 2) == 20.35
    assert result["price"] is None and "price" not in "\n".join(napkin_lines(result, card, 1024, 0.4))


def test_a_card_without_bfloat16_is_taken_at_its_float16_peak():
    assert napkin(1e9, 1e9, V100, mfu=1)["seconds"] == 6e18 / 125e12


def test_eight_h100_hold_40e9_parameters():
    assert max_params(H100, n_gpus=8, bytes_per_param=16, memory_bytes=80 * 10**9) == 40_000_000_000
    assert max_params(H100, n_gpus=8, bytes_per_param=16) == H100.memory_bytes // 2
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
        (lambda: plan(RTX4090, -1), "hours=-1"),
        (lambda: plan(RTX4090, 1e-4), "plan for more hours"),
        (lambda: plan(RTX4090, 24, memory_bytes=2**26), "64.0 MiB of memory is too little"),
        (lambda: plan(accelerator("gb300"), 24), "its memory is unknown"),
    ],
)
def test_mistakes_are_one_line(ask, words):
    assert words in message_of(ask)


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
def test_the_closed_form_is_what_the_step_counts(n_layer, n_embd):
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
    """Write a plan into a file, as a user would, and return the config that the file holds."""
    path = folder / "plan.py"
    path.write_text("\n".join(plan_lines(result)) + "\n", encoding="utf-8")
    return Config(**read_settings(path, Config))


@pytest.mark.parametrize("card, hours", [("rtx4090", 24), ("h100-sxm", 24), ("v100", 2), ("a100-40gb", 0.1)])
def test_a_plan_fits_its_card_its_hours_and_the_law(card, hours, tmp_path):
    spec = accelerator(card)
    result = plan(spec, hours, mfu=0.4)
    config = resolve(load_plan(result, tmp_path), spec)
    prediction = predict(config, spec, mfu=0.4)
    assert prediction["memory"]["peak"] <= 0.95 * spec.memory_bytes
    assert 0.99 < prediction["time"]["total_s"] / (3600 * hours) <= 1
    assert result["params"] == prediction["model"]["params"]
    assert result["tokens"] == config.max_iters * config.tokens_per_step
    assert abs(result["tokens"] / result["params"] / 20 - 1) < 0.05
    law_params, _ = compute_optimal(result["flops"])
    six_n, per_token = prediction["flops"]["six_nd_per_token"], prediction["flops"]["per_token"]
    with_attention = law_params * math.sqrt(six_n / per_token)  # as C = 20 N (FLOPs per token)
    assert math.isclose(result["params"], with_attention, rel_tol=0.03)
    assert config.lr_decay_iters == config.max_iters > config.warmup_iters and config.min_lr < config.learning_rate
    assert "Hoffmann et al. 2022" in result["config"] and "no room" not in result["config"]


def test_a_card_too_small_for_its_hours_gets_the_largest_model_that_fits(tmp_path):
    result = plan(RTX4090, 20000, mfu=0.4)
    config = resolve(load_plan(result, tmp_path), RTX4090)
    assert predict(config, RTX4090)["fits"] and result["tokens"] > 100 * result["params"]
    assert 0.7 < 16 * result["params"] / RTX4090.memory_bytes < 1
    assert "the card has no room for a larger model" in result["config"]


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
