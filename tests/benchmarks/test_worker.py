"""The process that is measured: the memory that it reports for a task."""

import mmap

import torch

from benchmarks import worker
from measure import memory


def test_peak_memory_is_what_came_after_idle():
    here = torch.device("cpu")
    idle = memory.idle_memory(here)
    with mmap.mmap(-1, 2**26) as block:
        block.write(bytes(2**26))
    assert memory.peak_memory(here) - idle > 0.9 * 2**26


def test_a_turn_reports_seconds_memory_above_idle_and_the_figures_of_the_task():
    class Task:
        device, idle = torch.device("cpu"), 1000

        def run(self, n):
            return {"n": n}

    figures = worker.turn(Task(), 3)
    assert set(figures) == {"seconds", "peak_bytes", "n"} and figures["n"] == 3
    assert 0 < figures["peak_bytes"] <= memory.peak_memory(torch.device("cpu")) - 1000
