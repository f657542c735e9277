"""What this machine does: its device as a record, its matmul ceiling, a step's peak of allocated memory and its FLOPs.

These are the figures that predictions are held against, and that no table knows.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import hardware
from config import ConfigError, require
from hardware import Device

MEMORY_NODES = Path("/sys/devices/system/node")  # Linux's; elsewhere there is no such folder
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler writes two lines of its own to stderr


def find_device(setting: str) -> tuple[torch.device, Device]:
    """Return the torch device that a `device` setting means here, and its record; one that is not there is an error."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(setting)
    except RuntimeError:
        raise ConfigError(f"device={setting!r}: not a device; use auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        n = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require(n > 0, f"device={setting!r}: this torch sees no CUDA device; --device=cpu runs without one")
        require((device.index or 0) < n, f"device={setting!r}: this machine has cuda:0 to cuda:{n - 1}")
        return torch.device("cuda", device.index or 0), cuda_record(device)
    if device.type == "mps":
        require(torch.backends.mps.is_available(), "device='mps': not available here; --device=cpu runs without it")
        return device, hardware.with_measured(Device("Apple GPU", "mps", dtypes=("float32", "bfloat16")))
    require(device.type == "cpu", f"device={setting!r}: napkin runs on cpu, cuda and mps")
    return device, hardware.with_measured(hardware.local_cpu())


def cuda_record(device: torch.device) -> Device:
    """Return the record of a CUDA device: what the table knows of its model, with the memory that is free now."""
    name = torch.cuda.get_device_name(device)
    major, _ = torch.cuda.get_device_capability(device)
    dtypes = ("float32", "float16", "bfloat16") if major >= 8 else ("float32", "float16")
    known = hardware.match(name) or Device(name, "cuda", dtypes=dtypes)
    free, _ = torch.cuda.mem_get_info(device)
    return hardware.with_measured(dataclasses.replace(known, memory_bytes=free))


def with_ceiling(record: Device, device: torch.device, dtype: str) -> Device:
    """Return the record with a peak for dtype and a bandwidth: the table's, or measured here, once and in under 2 s."""
    full = record
    if not record.peak(dtype):
        flops, n = matmul_ceiling(device, dtype)
        peaks = {**record.peak_flops, dtype: flops}
        measured = f"measured here: matmul of {n} cubed"
        source = measured if record.source == "unknown" else f"{record.source}; {dtype} {measured}"
        full = dataclasses.replace(full, peak_flops=peaks, source=source)
    if not record.bandwidth:
        full = dataclasses.replace(full, bandwidth=copy_bandwidth(device))
    if full != record or device.type != "cpu":  # a GPU is kept in any case: accounting.py cannot see it
        with contextlib.suppress(OSError):  # in a read-only checkout it is measured anew each time
            hardware.write_local(full)
    return full


def matmul_ceiling(device: torch.device, dtype: str, budget_s: float = 1.0) -> tuple[float, int]:
    """Return the best FLOP/s seen of n x n x n matmuls within about budget_s seconds, and n.

    n is 2,048, or the largest power of two below whose matmul does not take the whole budget: float16 on a CPU is
    hundreds of times slower than float32.
    """
    flops = math.inf
    for n in (256, 512, 1024, 2048):
        if 2 * n**3 / flops > budget_s / 4:
            return flops, n // 2
        flops = matmul_flops(device, dtype, n, budget_s if n == 2048 else 0.0)
    return flops, n


def matmul_flops(device: torch.device, dtype: str, n: int, budget_s: float = 0.5) -> float:
    """Return the best FLOP/s seen of n x n x n matmuls within about budget_s seconds."""
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    a @ b  # the first one sets things up
    return 2 * n**3 / best_seconds(lambda: a @ b, device, budget_s)


def best_seconds(run, device: torch.device, budget_s: float) -> float:
    """Return the least seconds of a few runs within about budget_s seconds."""
    best_s, end = math.inf, time.perf_counter() + budget_s
    for _ in range(1000):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best_s


def copy_bandwidth(device: torch.device, n_bytes: int = 2**27) -> float:
    """Return the best bytes/s seen of a copy, each byte read once and written once."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / best_seconds(lambda: target.copy_(source), device, 0.2)


def host_bandwidth(device: torch.device, pinned: bool, n_bytes: int = 2**27) -> float:
    """Return the best bytes/s seen of a copy from the host, which is pinned memory's only on request."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(source, device=device)
    return n_bytes / best_seconds(lambda: target.copy_(source, non_blocking=True), device, 0.2)


def what_slows_cpus() -> list[str]:
    """Return what makes this machine's cores slower than they need be, each with the way out."""
    cores, threads = hardware.usable_cores(), torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    nodes = len(list(MEMORY_NODES.glob("node[0-9]*")))
    found = []
    if threads > cores or (threads < cores and "OMP_NUM_THREADS" in os.environ):
        found.append(f"{threads} threads on {cores} cores; OMP_NUM_THREADS={cores} gives each its own")
    if load > 1.25 * cores:
        found.append(
            f"{load:.1f} threads wanted {cores} cores in the last minute; beside another program that computes, a step "
            "takes up to ten times as long"
        )
    if nodes > 1:
        found.append(
            f"memory lies in {nodes} nodes; numactl --cpunodebind=0 --membind=0 python ... keeps to one of them"
        )
    return found


def crossing_seconds(device: torch.device) -> float:
    """Return how much longer a CPU's cores take, per byte, to read what another core wrote than what they wrote.

    Both are a copy of 512 KiB: row by row as written, and with the rows in reverse order, so that each core reads the
    other's half. It depends on where the system put the threads, and may change while a program runs.
    """
    if device.type != "cpu":
        return 0.0
    x, out = torch.zeros(256, 512), torch.empty(256, 512)
    rows = torch.arange(256)

    def seconds(order):
        x.add_(1)
        start = time.perf_counter()
        torch.index_select(x, 0, order, out=out)
        return time.perf_counter() - start

    own, other = (sorted(seconds(order) for _ in range(60))[30] for order in (rows, rows.flip(0)))
    return max(0.0, other - own) / (x.numel() * x.element_size())


def keep_freed_memory():
    """Have glibc's allocator keep what is freed for the next step, instead of giving it back to the system.

    By default each step has its memory mapped and zeroed anew, page by page: a tenth of a small model's step, and a
    third of GPT-2's at batch 1, whose logits take hundreds of MB.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def synchronize(device: torch.device):
    """Wait for the device's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def counted_flops(model, config) -> int:
    """Return the FLOPs of one step by torch's counter: forward and backward of a micro-step, times accumulation.

    `model` is a meta copy, where attention decomposes into the matmuls that the counter knows.
    """
    idx = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    return counter.get_total_flops() * config.gradient_accumulation_steps


def profiled_peak(step, standing_bytes: int, device: torch.device):
    """Run step() and return (the peak of allocated bytes during it, what it returned, the bytes over time).

    On CUDA the allocator keeps the peak itself, and nothing over time. On a CPU both are the running sum of the
    allocator's events, which torch.profiler records, on top of standing_bytes, what was alive before; over time it is
    the most in each of 100 parts of the step, as (fraction of the step, bytes).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device), result, None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    now, peak, curve = standing_bytes, standing_bytes, {}
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
        part = 100 * (event.start_ns() - events[0].start_ns()) // (events[-1].start_ns() - events[0].start_ns() + 1)
        curve[part] = max(curve.get(part, 0), now)
    return peak, result, [(part / 100, n_bytes) for part, n_bytes in curve.items()]


def standing_bytes(tensors) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def process_memory(device: torch.device) -> int:
    """Return what the run occupies now: allocated bytes on CUDA, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the most it ever was
        import resource

        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
