"""FLOPs against torch's counter, and the conventions in which they are counted."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from estimate.predict import predict
from estimate.step import training_step
from measure.step import counted_flops
from model import build
from tests.estimate.helpers import ALL, CPU, GPT2_124M, GRID, config_of, total_flops


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", ALL)
def test_flops_equal_what_torch_counts(shape, accumulation):
    config = config_of(gradient_accumulation_steps=accumulation, **ALL[shape])
    assert total_flops(config) == counted_flops(config)


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
    ops = training_step(config, CPU).ops
    predicted = [sum(op.flops * op.times for op in ops if op.phase == phase) for phase in ("forward", "backward")]
    assert predicted == [forward.get_total_flops(), backward.get_total_flops()]


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp"])
def test_chunks_never_change_flops(shape):
    totals = {total_flops(config_of(**GRID[shape], loss_chunk=chunk)) for chunk in (None, 1, 7, 32, 96, 1000)}
    assert len(totals) == 1


def test_gpt2_figures_of_the_transformer_sizing_notebook():
    """FLOPs of GPT-2 124M at T = 1,024, B = 1, and bytes per saved activation where nothing differs from nanoGPT."""
    config = config_of(**GPT2_124M)
    s = training_step(config, CPU)
    forward = sum(op.flops * op.times for op in s.ops if op.phase == "forward")
    assert forward == 291_648_307_200
    assert sum(op.flops * op.times for op in s.ops) - forward == 583_296_614_400
    assert predict(config, CPU)["model"]["params_matmul"] == 123_532_032


def test_tying_changes_parameters_and_never_flops():
    tied, untied = config_of(), config_of(tie_weights=False)
    assert total_flops(tied) == total_flops(untied)
    apart = predict(untied, CPU)["model"]["params"] - predict(tied, CPU)["model"]["params"]
    assert apart == 300 * 64
    assert predict(untied, CPU)["model"]["params_matmul"] == predict(tied, CPU)["model"]["params_matmul"]


def test_fewer_key_value_heads_shrink_projections_and_never_scores():
    def score_flops(config):
        return sum(op.flops for op in training_step(config, CPU).ops if op.name.startswith("attention"))

    per_head = [config_of(n_kv_head=k) for k in (4, 2, 1)]
    assert len({score_flops(c) for c in per_head}) == 1 and score_flops(per_head[0]) > 0
    params = [predict(c, CPU)["model"]["params"] for c in per_head]
    assert params[0] - params[1] == 2 * 2 * 64 * 2 * 16 and params == sorted(params, reverse=True)


def test_the_causal_convention_counts_what_the_mask_leaves():
    flops = predict(config_of(), CPU)["flops"]
    pairs = sum(op.flops for op in training_step(config_of(), CPU).ops if op.is_attention)
    assert pairs == 3 * 2 * 2 * (2 * 3 * 32 * 32 * 64)  # forward and twice that, L, two matmuls, 2 B T T C
    assert flops["per_step"] - flops["causal_per_step"] == pairs * 31 // 64  # T (T - 1) / 2 of T^2 pairs are masked


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp"])
def test_what_is_computed_again_counts_for_the_hardware_and_never_for_the_model(shape):
    """Else recomputation would raise the MFU of a step that it makes slower."""
    once, again = (predict(config_of(**GRID[shape], recompute=how), CPU, mfu=None) for how in ("none", "block"))
    for name in ("per_step", "causal_per_step", "six_nd_per_step"):
        assert once["flops"][name] == again["flops"][name]
    assert once["flops"]["hardware_per_step"] == once["flops"]["per_step"] < again["flops"]["hardware_per_step"]
    assert again["time"]["step_s"] > once["time"]["step_s"] and again["time"]["mfu"] < once["time"]["mfu"]
