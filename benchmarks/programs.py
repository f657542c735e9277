"""Measures whole programs: data/prepare.py compared with tiktoken alone, and the start-up of each command."""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.shapes import SHAPE, SHAPES
from benchmarks.turns import speedup, spread, write_tokens
from cli.errors import require
from config import ROOT
from data import tokenizer


def prepare(config, options, device, spec):
    """Yield a row per number of processes: the bytes/s of data/prepare.py (start included) and of tiktoken alone."""
    vocabulary, name = tokenizer.load("gpt2"), "text" if options.input else "stdlib"
    choices = list(dict.fromkeys(map(int, options.workers.split(",")))) if options.workers else [None]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / name
        base = [sys.executable, ROOT / "data" / "prepare.py", target, "--tokenizer=gpt2"]
        base += [f"--input={os.path.abspath(options.input)}"] if options.input else []
        commands = [base + ([f"--workers={n}"] if n else []) for n in choices]
        # These runs are not timed, because reading the memory of a process slows it.
        peaks = [peak_memory_of(command) for command in commands]
        texts = pieces(target, vocabulary)
        meta = json.loads((target / "meta.json").read_text(encoding="utf-8"))
        size = sum(split["bytes"] for split in meta["splits"].values())
        found = {n: [] for n in choices}
        for _ in range(options.repetitions):
            for n, command in zip(choices, commands, strict=True):
                start = time.perf_counter()
                check_status(command, subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode)
                between = time.perf_counter()
                vocabulary.encode_ordinary_batch(texts, num_threads=n or torch.get_num_threads())
                found[n].append((between - start, time.perf_counter() - between))
    for (n, figures), peak in zip(found.items(), peaks, strict=True):
        ours, alone = zip(*figures, strict=True)
        yield {
            "workers": n,
            "text_bytes": size,
            "bytes_per_s": size / statistics.median(ours),
            "seconds": statistics.median(ours),
            "spread": spread(ours),
            "peak_bytes": peak,
            "tiktoken_bytes_per_s": size / statistics.median(alone),
            **speedup(ours, alone),
        }


def pieces(folder, vocabulary):
    """Return the text of the prepared tokens, cut into pieces small enough to keep every thread of tiktoken busy."""
    texts = []
    for file in ("train.bin", "val.bin"):
        ids = np.fromfile(folder / file, dtype="<u2")
        documents = np.split(ids, np.flatnonzero(ids == vocabulary.eot_token) + 1)
        texts += [vocabulary.decode([i for i in d.tolist() if i != vocabulary.eot_token]) for d in documents]
    return [text[i : i + 2**16] for text in texts for i in range(0, len(text), 2**16)]


def peak_memory_of(command):
    """Run a command; return the peak of the memory of the process and its descendants, each shared page counted once.

    The memory is read every 20 ms. The result is 0 on systems without /proc.
    """
    most = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            most = max(most, sum(map(proportional_bytes, process_tree(process.pid))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
    finally:
        process.kill()
    check_status(command, process.returncode)
    return most


def check_status(command, status):
    require(status == 0, f"{' '.join(map(str, command[1:]))} failed; its error message is above")


def process_tree(pid):
    """Yield the ids of a process and of its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield from process_tree(int(child))


def proportional_bytes(pid):
    """Return the memory of a process, in which a page shared by n processes counts 1/n; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return int(re.search(r"^Pss:\s*(\d+)", text, re.M)[1]) * 1024
    except (OSError, TypeError):
        return 0


def startup(config, options, device, spec):
    """Yield a row per program: the seconds from its start to its first line, its first training step, and its end."""
    tiny = [f"--{name}={value}" for name, value in zip(SHAPE, SHAPES["tiny"], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), 65, 2**16)
        few = ["--max_iters=1", "--eval_iters=1", "--sample_tokens=0", "--gradient_accumulation_steps=1"]
        places = [f"--dataset={folder}", f"--out_dir={folder}/out", f"--device={config.device}", "--overwrite"]
        commands = {
            "import torch": ["-c", "import torch"],
            "train.py tiny": ["train.py", *tiny, *few, *places],
            "accounting.py": ["accounting.py", "configs/gpt2.py", "--gpu=a100-40gb"],
        }
        rounds = [{name: milestones(c) for name, c in commands.items()} for _ in range(1 + options.repetitions)]
    for program in commands:
        first_line, first_step, end = zip(
            *(found[program] for found in rounds[1:]), strict=True
        )  # round 0 is a warm-up
        yield {
            "program": program,
            "first_line_s": first_line[0] and statistics.median(first_line),
            "first_step_s": first_step[0] and statistics.median(first_step),
            "end_s": statistics.median(end),
            "spread": spread(end),
        }


def milestones(arguments):
    """Run Python with the arguments; return the seconds until the first line, the first training step, and the end.

    The first line or step is None if the program prints no such line.
    """
    start, first_line, first_step = time.perf_counter(), None, None
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, env=environment, text=True
    )
    with process:
        for text in process.stdout:
            now = time.perf_counter() - start
            first_line = first_line or now
            first_step = first_step or (now if text.startswith("step 1/") else None)
    require(process.returncode == 0, f"{arguments[0]} failed; its error message is above")
    return first_line, first_step, time.perf_counter() - start
