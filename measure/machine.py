"""What this machine's device attains: matmul FLOP/s, bandwidths, and what slows it down."""

import contextlib
import dataclasses
import math
import os
import time
from pathlib import Path

import torch

from cli.errors import ConfigError, require
from hardware import accelerators, machine
from hardware.spec import DeviceSpec

MEMORY_NODES = Path("/sys/devices/system/node")  # Linux's; elsewhere there is no such folder


def find_device(setting: str) -> tuple[torch.device, DeviceSpec]:
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
        return torch.device("cuda", device.index or 0), cuda_spec(device)
    if device.type == "mps":
        require(torch.backends.mps.is_available(), "device='mps': not available here; --device=cpu runs without it")
        spec = DeviceSpec("Apple GPU", "mps", dtypes=("float32", "bfloat16"))
        return device, machine.with_measured(spec, conditions=conditions())
    require(device.type == "cpu", f"device={setting!r}: napkin runs on cpu, cuda and mps")
    return device, machine.with_measured(machine.local_cpu(), conditions=conditions())


def cuda_spec(device: torch.device) -> DeviceSpec:
    """Return the spec of a CUDA device: what the table knows of its model, with the memory that is free now."""
    name = torch.cuda.get_device_name(device)
    major, _ = torch.cuda.get_device_capability(device)
    dtypes = ("float32", "float16", "bfloat16") if major >= 8 else ("float32", "float16")
    known = accelerators.match(name) or DeviceSpec(name, "cuda", dtypes=dtypes)
    free, total = torch.cuda.mem_get_info(device)
    return machine.with_measured(
        dataclasses.replace(known, memory_bytes=free, total_bytes=total), conditions=conditions()
    )


def conditions() -> str:
    """Return what measured figures depend on besides the device: torch's version and the number of threads."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def with_measured_peak(spec: DeviceSpec, device: torch.device, dtype: str) -> DeviceSpec:
    """Return the spec with a peak for dtype and a bandwidth: the table's, or measured here, once and in about 2 s."""
    full = spec
    if not spec.peak(dtype):
        flops, n = matmul_ceiling(device, dtype)
        full = with_peak(spec, dtype, flops, f"measured here: matmul of {n} cubed")
    if not spec.bandwidth:
        full = dataclasses.replace(full, bandwidth=copy_bandwidth(device))
    if full != spec or device.type != "cpu":  # a GPU is kept in any case: accounting.py cannot see it
        keep(full)
    return full


def with_peak(spec: DeviceSpec, dtype: str, flops: float, source: str) -> DeviceSpec:
    """Return the spec with another peak for a dtype, and with where it is from."""
    if spec.source != "unknown" and not spec.source.startswith("measured here"):
        source = f"{spec.source}; {dtype} {source}"  # the other dtypes' peaks are still the table's
    return dataclasses.replace(spec, peak_flops={**spec.peak_flops, dtype: flops}, source=source)


def raised_peak(spec: DeviceSpec, dtype: str, flops: float, by: str) -> DeviceSpec:
    """Return the spec with a peak of at least `flops`: what ran faster than the peak shows that the peak was too low.

    A ceiling that was measured beside a busy program is lower than what the machine attains later. It is raised in the
    file as well, so that the next run starts with the right one.
    """
    if not spec.peak(dtype) or flops <= spec.peak(dtype):
        return spec
    spec = with_peak(spec, dtype, flops, f"measured here: {by}")
    keep(spec)
    return spec


def keep(spec: DeviceSpec):
    """Write a spec's figures into hardware.local.json; in a read-only checkout they are measured anew each time."""
    with contextlib.suppress(OSError):
        machine.write_local(spec)


def matmul_ceiling(device: torch.device, dtype: str, budget_s: float = 1.5) -> tuple[float, int]:
    """Return the best FLOP/s seen of n x n x n matmuls within about budget_s seconds, and the best n.

    Sizes take turns, several times, so that a busy neighbour does not spoil all of one. Sizes that would take too much
    of the budget are left out: float16 on a CPU is hundreds of times slower than float32.
    """
    best, end = {256: matmul_flops(device, dtype, 256, 0.0)}, time.perf_counter() + budget_s
    for n in (512, 1024, 2048):
        if 2 * n**3 / best[n // 2] < budget_s / 4:
            best[n] = matmul_flops(device, dtype, n, 0.0)
        else:
            break
    while time.perf_counter() < end:
        for n in best:
            best[n] = max(best[n], matmul_flops(device, dtype, n, budget_s / 50))
    n = max(best, key=best.get)
    return best[n], n


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
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)  # zeros may be pages that are not there yet
    target = torch.empty_like(source)
    return 2 * n_bytes / best_seconds(lambda: target.copy_(source), device, 0.2)


def host_bandwidth(device: torch.device, pinned: bool, n_bytes: int = 2**27) -> float:
    """Return the best bytes/s seen of a copy from the host, which is pinned memory's only on request."""
    source = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty_like(source, device=device)
    return n_bytes / best_seconds(lambda: target.copy_(source, non_blocking=True), device, 0.2)


def cpu_warnings() -> list[str]:
    """Return what makes this machine's cores slower than they need be, each with the way out."""
    cores, threads = machine.usable_cores(), torch.get_num_threads()
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


def cross_core_s_per_byte(device: torch.device) -> float:
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


def synchronize(device: torch.device):
    """Wait for the device's queue; a CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
