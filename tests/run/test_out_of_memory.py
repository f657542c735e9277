"""Memory that runs out in spite of the prediction: one line, whichever allocator says so and however."""

import pytest
import torch

import trainer
from cli.errors import ConfigError
from run.out_of_memory import refuse_if_out_of_memory

CPU_SAYS = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(CPU_SAYS),
        RuntimeError("MPS backend out of memory (MPS allocated: 7 GiB)"),
        MemoryError("Unable to allocate 2 GiB for an array"),
    ],
)
def test_every_allocators_failure_is_one_line_with_the_prediction(run, monkeypatch, error):
    def allocate(*arguments, **settings):
        raise error

    monkeypatch.setattr(trainer, "AdamW", allocate)
    said = run(status=2, max_iters=1)
    assert "out of memory: " in said and "were predicted at the peak" in said and "were available at the start" in said
    assert "A smaller --batch_size takes less" in said and str(error) in said


def test_a_real_failure_of_the_cpus_allocator_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match=r"^out of memory: 2\.0 KiB were predicted at the peak\. Does another program"
    ):
        refuse_if_out_of_memory(caught.value, {"peak": 2048, "available": None}, torch.device("cpu"))


def test_another_error_comes_through_as_it_is(run, monkeypatch):
    def allocate(*arguments, **settings):
        raise RuntimeError("a bug")

    monkeypatch.setattr(trainer, "AdamW", allocate)
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        run(max_iters=1)
