"""The predicted peak against torch's memory tracker and allocator, and what is alive over a step."""

import math

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from estimate.memory import Timeline
from estimate.predict import predict
from estimate.step import training_step
from hardware.accelerators import accelerator
from measure.step import profiled_peak
from tests.estimate.helpers import ALL, CPU, GRID, TorchStep, config_of, peak, total_flops

SCALARS = 64  # bytes: the loss, its parts and the optimizer's few numbers, which the prediction leaves out


def bias_too_early(config):
    """Return the bytes of a bias's gradient, which a recomputed matmul makes when what it kept is gone already."""
    return 4 * config.n_embd if config.bias and config.recompute == "block" else 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ALL)
def test_the_peak_is_that_of_torchs_memory_tracker(shape, dtype):
    config = config_of(dtype=dtype, **ALL[shape])
    step = TorchStep(config)
    step()  # the steady step is what is predicted
    tracker = MemTracker()
    tracker.track_external(step.model, *step.persistent())
    with tracker:
        step()
    (measured,) = (device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    t = Timeline(training_step(config, CPU))
    unseen = sum(b.bytes * n for b, n in t.alive(t.peak_op) if "random" in b.name)  # made outside of what it tracks
    assert -bias_too_early(config) <= measured - (t.peak - unseen) <= SCALARS


FEW_TOKENS = {"batch_size": 1, "block_size": 7, "vocab_size": 2000}
TIED = {  # the two gradients of the tied table meet at the peak
    "tied, few tokens": FEW_TOKENS,
    "tied, few tokens, chunked loss": FEW_TOKENS | {"loss_chunk": 3},
}
ONE_PASS = {  # the peak of the first is the update, unless that takes no temporary
    f"{name}, AdamW in one pass": GRID[name] | {"compile_optimizer": True} for name in ("wide, few tokens", "gpt2")
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", [*ALL, *TIED, *ONE_PASS])
def test_the_peak_is_what_the_allocator_reached(shape, accumulation):
    """In float32: on a CPU a bfloat16 matmul takes scratch memory of its own, which shows in models so small."""
    config = config_of(gradient_accumulation_steps=accumulation, **{**ALL, **TIED, **ONE_PASS}[shape])
    step = TorchStep(config)
    step()
    measured, *_ = profiled_peak(step, step.persistent(), torch.device("cpu"))
    assert -bias_too_early(config) <= measured - peak(config, CPU) <= SCALARS


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp", "chunked loss", "wide, few tokens"])
def test_the_first_step_takes_what_every_other_takes(shape):
    """The moments are there before it; without accumulation no step finds gradients."""
    config = config_of(**GRID[shape])
    step = TorchStep(config)
    first, *_ = profiled_peak(step, step.persistent(), torch.device("cpu"))
    assert 0 <= first - peak(config, CPU) <= SCALARS


def test_the_peak_of_a_model_of_some_size_is_within_one_percent():
    config = config_of(dtype="bfloat16", n_layer=4, n_embd=256, block_size=128, batch_size=8, vocab_size=1000)
    step = TorchStep(config)
    step()
    measured, *_ = profiled_peak(step, step.persistent(), torch.device("cpu"))
    assert math.isclose(peak(config, CPU), measured, rel_tol=0.01)


def test_accumulation_multiplies_flops_and_keeps_gradients_beside_activations():
    one, three, forty = (config_of(gradient_accumulation_steps=n) for n in (1, 3, 40))
    assert total_flops(three) == 3 * total_flops(one)
    peaks = [peak(c, CPU) for c in (one, three, forty)]
    assert peaks[1] == peaks[2] == peaks[0] + 4 * predict(one, CPU)["model"]["params"]


def test_activations_are_linear_in_the_batch():
    sizes = [predict(config_of(batch_size=b), CPU)["memory"]["activations"] for b in (1, 2, 3, 4)]
    assert sizes == [sizes[0] * b for b in (1, 2, 3, 4)]


def test_what_is_alive_at_the_peak_adds_up_to_it():
    for settings in GRID.values():
        memory = predict(config_of(**settings), CPU)["memory"]
        assert sum(memory["at_peak"].values()) == memory["peak"]


def test_what_a_card_holds_beside_the_tensors_is_named_apart():
    a100 = accelerator("a100-40gb")
    memory = predict(config_of(), a100)["memory"]
    assert list(memory["card"]) == ["allocator rounding", "cuBLAS workspace", "CUDA context", "fragmentation"]
    t = Timeline(training_step(config_of(), a100))
    rounded = sum(-(-b.bytes // 512) * 512 * count for b, count in t.alive(t.peak_op))
    assert memory["card"]["allocator rounding"] == (rounded - memory["peak"],) * 2
    assert memory["pinned_host"] == 2 * 2 * 8 * 3 * 32
    assert predict(config_of(), CPU)["memory"]["card"] is None
