"""The operations of a step against torch: which parameters there are, and what each forward keeps for its backward."""

import dataclasses
import itertools

import pytest
import torch

from config import Config, resolve
from estimate.flops import parameters, step_flops
from estimate.memory import Timeline, step_memory
from estimate.step import generation_step, training_step
from hardware.accelerators import accelerator
from model import build
from tests.estimate.helpers import CPU, GPT2_124M, GRID, LLAMA, SMALL, TorchStep, config_of


@pytest.mark.parametrize("shape", GRID)
def test_parameters_are_the_models_own_name_by_name(shape):
    config = config_of(**GRID[shape])
    with torch.device("meta"):
        own = {name: tuple(p.shape) for name, p in build(config).named_parameters()}
    assert {name: p.shape for name, p in training_step(config, CPU).params.items()} == own


# --- what forward saves


def saved_by_torch(step):
    """Return the bytes of each storage that autograd keeps of a forward, the model's own left out."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert step.forward().requires_grad
    of_the_model = {t.untyped_storage().data_ptr() for t in [*step.model.parameters(), *step.model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return [n for pointer, n in storages.items() if pointer not in of_the_model]


def saved_by_prediction(config):
    """Return the bytes of each buffer that the predicted backward reads of its forward, the batch included."""
    s = training_step(config, CPU)
    batch = {b for op in s.ops if op.phase == "backward" for b in op.reads if b.kind == "batch"}
    return [b.bytes for b, count in Timeline(s).saved() for _ in range(count)] + [b.bytes for b in batch]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", GRID)
def test_each_tensor_that_autograd_saves_is_a_buffer_of_the_step(shape, dtype):
    config = config_of(dtype=dtype, **GRID[shape])
    saved, predicted = saved_by_torch(TorchStep(config)), saved_by_prediction(config)
    assert sum(predicted) == sum(saved)
    assert sorted(predicted) == sorted(saved)


@pytest.mark.parametrize("shape", ["gpt2", "llama", "mlp", "chunked loss, a rest"])
def test_fewer_tokens_than_the_context_save_what_a_shorter_context_saves(shape):
    config = config_of(**GRID[shape])
    step = TorchStep(config)
    step.x, step.y = step.x[:, :20].contiguous(), step.y[:, :20].contiguous()
    shorter = dataclasses.replace(config, block_size=20)
    assert sorted(saved_by_torch(step)) == sorted(saved_by_prediction(shorter))


def test_saved_bytes_of_gpt2_as_measured_on_nanogpt_in_float32():
    config = config_of(**{**GPT2_124M, "batch_size": 2})
    s = training_step(config, CPU)
    batch = sum(b.bytes for b in s.persistent if b.kind == "batch")
    position_indices = 8 * 1024  # nanoGPT looks its positions up; a slice needs no indices
    assert sum(b.bytes * count for b, count in Timeline(s).saved()) + batch + position_indices == 1_633_878_020


def test_a_cpu_takes_attention_in_bfloat16_where_tiles_can_compute_it():
    """Not so with dropout of its weights, nor behind the cache of generation: those are torch's, in float32 there."""
    gpu, config = accelerator("a100-40gb"), config_of(dtype="bfloat16")
    dropped = config_of(dtype="bfloat16", attn_dropout=0.1)

    def dtypes(ops):
        return {op.output.dtype for op in ops if op.is_attention}

    assert dtypes(training_step(config, gpu).ops) == dtypes(training_step(config, CPU).ops) == {"bfloat16"}
    assert dtypes(training_step(dropped, gpu).ops) == {"bfloat16"}
    assert dtypes(training_step(dropped, CPU).ops) == {"float32"}
    assert dtypes(generation_step(config, gpu, 1, 4, 0).ops) == {"bfloat16"}
    assert dtypes(generation_step(config, CPU, 1, 4, 0).ops) == {"float32"}
    for c in (config, dropped):  # the model agrees: it keeps what the prediction says
        assert sorted(saved_by_torch(TorchStep(c))) == sorted(saved_by_prediction(c))


# --- what is recorded


def test_what_decides_between_all_logits_and_chunks():
    """Few logits are computed at once; of many, as many as make 2^25 numbers at most."""
    for batch_size, vocab_size, expected in ((3, 300, None), (256, 1024, None), (257, 1024, 2**15), (64, 50304, 512)):
        config = resolve(Config(**SMALL | {"batch_size": batch_size, "vocab_size": vocab_size}), CPU)
        rows = batch_size * config.block_size
        assert config.loss_chunk == (expected and min(expected, rows))
    one = resolve(Config(**SMALL | {"vocab_size": 2**26}), CPU)
    assert one.loss_chunk == 1


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
        short, whole = training_step(config, CPU), training_step(config, CPU, whole=True)
        assert len(short.ops) < len(whole.ops) or n_layer == 5
        for fold in (parameters, step_flops, step_memory):
            assert fold(short) == fold(whole), (fold, n_layer, dtype)
        assert max(op.repeat for op in whole.ops) == 1
        assert sum(op.bytes * op.times for op in short.ops) == sum(op.bytes * op.times for op in whole.ops)
