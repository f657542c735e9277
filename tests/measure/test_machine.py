"""What this machine attains, and what slows its cores."""

import os
import subprocess
import sys

import pytest
import torch

import hardware.machine
from hardware.spec import DeviceSpec
from measure import machine


@pytest.mark.parametrize(
    "threads, omp, load, nodes, words",
    [
        (2, False, 2.4, 1, []),
        (4, False, 0.0, 1, ["4 threads on 2 cores; OMP_NUM_THREADS=2 gives each its own"]),
        (1, True, 0.0, 1, ["1 threads on 2 cores; OMP_NUM_THREADS=2 gives each its own"]),
        (1, False, 0.0, 1, []),  # torch's own choice, where two threads share a core
        (2, False, 2.6, 1, ["2.6 threads wanted 2 cores in the last minute"]),
        (2, False, 0.0, 2, ["memory lies in 2 nodes; numactl --cpunodebind=0 --membind=0"]),
    ],
)
def test_what_slows_a_cpu_is_said_with_the_way_out(monkeypatch, tmp_path, threads, omp, load, nodes, words):
    monkeypatch.setattr("hardware.machine.usable_cores", lambda: 2)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0), raising=False)
    monkeypatch.setattr(machine, "MEMORY_NODES", tmp_path)
    for i in range(nodes):
        (tmp_path / f"node{i}").mkdir()
    (tmp_path / "possible").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1") if omp else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = machine.cpu_warnings()
    assert len(found) == len(words) and all(text.startswith(word) for text, word in zip(found, words, strict=True))


@pytest.mark.parametrize("dtype", ["float32"])
def test_a_ceiling_measured_beside_a_busy_process_is_raised_by_what_runs_later(dtype, local_file):
    """The neighbour takes a core for the whole measurement, and is gone when the run starts."""
    cpu = torch.device("cpu")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        flops, n = machine.matmul_ceiling(cpu, dtype, budget_s=0.3)
        neighbour.kill()
    spec = DeviceSpec("this CPU", "cpu", peak_flops={dtype: flops}, source=f"measured here: matmul of {n} cubed")
    later = max(machine.matmul_flops(cpu, dtype, n, 0.1) for n in (512, 1024))
    for attained in (later, 2 * flops, flops / 2):  # the second is certainly faster, the third certainly slower
        raised = machine.raised_peak(spec, dtype, attained, "a test")
        assert raised.peak(dtype) == max(flops, attained) and attained / raised.peak(dtype) <= 1
        kept = hardware.machine.read_local(local_file).get("this CPU")
        assert attained <= flops or kept.peak(dtype) >= attained


def test_the_ceiling_is_the_best_of_several_sizes(monkeypatch):
    monkeypatch.setattr(machine, "matmul_flops", lambda device, dtype, n, budget_s: {1024: 5e11}.get(n, 1e11))
    assert machine.matmul_ceiling(torch.device("cpu"), "float32", budget_s=0.1) == (5e11, 1024)


def test_bandwidth_is_not_that_of_pages_which_are_not_there(monkeypatch):
    """A source of zeros may be one page of the system's that is mapped many times, and stays in the cache."""
    made = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: made.append(args) or ones(*args, **kwargs))
    assert machine.copy_bandwidth(torch.device("cpu"), n_bytes=2**20) > 0 and made
