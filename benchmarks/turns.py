"""Programs that are compared run alternately: each has its own process, which sleeps while another has its turn."""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cli.errors import ConfigError, require
from config import ROOT, Config

PAUSE = 0.3  # seconds after a turn, because the threads of a process spin for a while before they sleep
WARM_UP = 3  # uncounted steps before the first turn, in which memory is allocated and GPU kernels are compiled
TURN_S = 2  # seconds that a turn takes if the number of its steps is not given


class BenchProcess:
    """A process (benchmarks/worker.py) that sets up one task, and runs it when asked. It sleeps in between."""

    def __init__(self, task: str, config: Config, path: str | None = None):
        self.name = "nanoGPT" if path else "napkin"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, encoding="utf-8",
        )  # fmt: skip
        try:
            self.ask({"task": task, "path": path, "config": dataclasses.asdict(config),
                      "threads": torch.get_num_threads()})  # fmt: skip
        except BaseException:
            self.close()
            raise

    def turn(self, n: int) -> dict:
        """Run the task n times in a row; return the total seconds, peak_bytes, and what else the task reports."""
        figures = self.ask({"n": n})
        time.sleep(PAUSE)
        return figures

    def ask(self, job: dict) -> dict:
        """Send one line to the process; return its answer, or raise ConfigError if it failed or ended."""
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            raise ConfigError(f"{self.name}: its process ended with status {status}; perhaps memory ran out")
        reply = json.loads(line)
        require("error" not in reply, f"{self.name}: {reply.get('error')}")
        return reply

    def close(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # closing writes what the process has not read
            self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


@contextlib.contextmanager
def bench_processes(task: str, configs: list[Config], peer: str | None, n_tokens: int):
    """Yield one of our processes per config, then nanoGPT's for the first config if a peer is given.

    All of them read the same random tokens.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_tokens(Path(folder), configs[0].vocab_size, n_tokens)
        tasks = [(c, None) for c in configs] + ([(configs[0], os.path.abspath(peer))] if peer else [])
        yield [
            stack.enter_context(BenchProcess(task, dataclasses.replace(c, dataset=folder), path)) for c, path in tasks
        ]


def write_tokens(folder: Path, vocab_size: int, n: int):
    """Write n random ids as the training split, by repeating a million of them, and a short validation split."""
    ids = np.random.default_rng(0).integers(0, vocab_size, 2**20, dtype=np.uint16)
    with open(folder / "train.bin", "wb") as file:
        for start in range(0, n, len(ids)):
            file.write(ids[: n - start].tobytes())
    (folder / "val.bin").write_bytes(ids[:2048].tobytes())


def measure_alternating(runs: list, n: int | None, repetitions: int, before=None):
    """Return (steps in a turn, repetitions); a repetition is (result of before(), figures of each run in turn).

    run(n) takes n steps and returns its figures, with the seconds among them. Every run first takes some steps that
    are not counted. If n is None, a step of the first run is timed to find how many steps fit into a turn.
    """
    for run in runs:
        run(WARM_UP)
    n = n or max(1, min(1000, round(TURN_S / runs[0](1)["seconds"])))
    found = []
    for _ in range(repetitions):
        first = before and before()
        time.sleep(PAUSE if before else 0)
        found.append((first, *(run(n) for run in runs)))
    return n, found


def spread(values) -> list:
    """Return the smallest and the largest value."""
    return [min(values), max(values)]


def speedup(ours, theirs) -> dict:
    """Return how many times as fast ours is, from the seconds of both in each repetition: the median and the spread."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_spread": spread(ratios)}
