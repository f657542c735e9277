"""A process that is measured, started by benchmarks/turns.py: python -m benchmarks.worker

The first JSON line on stdin says what to set up. Each further line asks for a turn. Each line is answered by a JSON
line on stdout.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.nanogpt import NanoGPTBatches, NanoGPTGeneration, NanoGPTTraining
from benchmarks.ours import Batches, Generation, Training
from cli.errors import ConfigError
from config import Config
from measure.machine import synchronize
from measure.memory import idle_memory, peak_memory

TASKS = {  # task -> (class of ours, class of nanoGPT's); each has run(n)
    "train": (Training, NanoGPTTraining),
    "loader": (Batches, NanoGPTBatches),
    "decode": (Generation, NanoGPTGeneration),
}


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process receives Ctrl-C too, and ends this one
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what nanoGPT prints must not mix with the answers
    import torch._dynamo  # torch's AdamW imports it: 70 MB that must not count as the memory of one program only

    task = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if task is None:
                torch.set_num_threads(job.pop("threads"))
                task, answer = set_up(**job), {}
            else:
                answer = turn(task, job["n"])
        except Exception as error:  # nanoGPT may raise anything; the parent process reports it
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            answer = {"error": f"{kind}{error}"}
        print(json.dumps(answer), file=answers, flush=True)


def set_up(task: str, config: dict, path: str | None = None):
    """Return the task's object, of nanoGPT if the path of a checkout is given."""
    config = Config(**config)
    idle = idle_memory(torch.device(config.device))
    ours, nanogpt = TASKS[task]
    found = ours(config) if path is None else nanogpt(config, Path(path))
    found.device, found.idle = torch.device(config.device), idle
    return found


def turn(task, n: int) -> dict:
    """Run the task n times; return the seconds, the peak of memory above the idle process's, and the run's figures."""
    synchronize(task.device)
    start = time.perf_counter()
    figures = task.run(n) or {}
    synchronize(task.device)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": peak_memory(task.device) - task.idle, **figures}


if __name__ == "__main__":
    main()
