"""What one training step takes: its FLOPs by torch's counter, and the peak of allocated memory."""

import os

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from measure.machine import synchronize
from model import build

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes two lines of its own to stderr


def counted_flops(config) -> int:
    """Return the FLOPs of one step by torch's counter: forward and backward of a micro-step, times accumulation.

    They are counted on a copy on the meta device, where attention decomposes into the matmuls that the counter knows.
    """
    with torch.device("meta"):
        model = build(config)
    idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    return counter.get_total_flops() * config.gradient_accumulation_steps


def profiled_peak(step, persistent: list[torch.Tensor], device: torch.device):
    """Run step() and return (the peak of allocated bytes during it, what it returned, the bytes over time).

    On CUDA the allocator keeps the peak itself, and nothing over time. On a CPU both are the running sum of the
    allocator's events, which torch.profiler records, on top of the persistent tensors, alive before; over time it is
    the most in each of 100 parts of the step, as (fraction of the step, bytes).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device), result, None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    now = peak = storage_bytes(persistent)
    curve = {}
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
        part = 100 * (event.start_ns() - events[0].start_ns()) // (events[-1].start_ns() - events[0].start_ns() + 1)
        curve[part] = max(curve.get(part, 0), now)
    return peak, result, [(part / 100, n_bytes) for part, n_bytes in curve.items()]


def storage_bytes(tensors) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
