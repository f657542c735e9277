"""The commands prepare and startup, and the memory and milestones of the programs that they start."""

import mmap
import os
import sys

import numpy as np
import pytest

from benchmarks import programs
from cli import flags
from cli.errors import ConfigError
from config import Config, check
from data import tokenizer
from train import Options as TrainOptions


def test_prepare(rows_of, gpt2_vocabulary, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"Text number {i}, of some words.\n" * 50, encoding="utf-8")
    (row,) = rows_of("prepare", f"--input={tmp_path}", "--repetitions=1")
    keys = {"workers", "text_bytes", "bytes_per_s", "seconds", "peak_bytes", "tiktoken_bytes_per_s"}
    assert set(row) == keys | {"spread", "ratio", "ratio_spread"}
    assert row["text_bytes"] == 3 * 50 * 30 and row["workers"] is None


def test_tiktoken_encodes_the_text_that_was_prepared(gpt2_vocabulary, tmp_path):
    vocabulary = tokenizer.load("gpt2")
    documents = [["A first one. " * 10000, "A second"], ["A third, <|endoftext|> spelled out"]]
    for file, texts in zip(("train.bin", "val.bin"), documents, strict=True):
        ids = [i for text in texts for i in [*vocabulary.encode_ordinary(text), vocabulary.eot_token]]
        np.array(ids, dtype="<u2").tofile(tmp_path / file)
    found = programs.pieces(tmp_path, vocabulary)
    assert "".join(found) == "".join(documents[0] + documents[1]) and max(map(len, found)) == 2**16


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of another process is read from /proc")
def test_the_memory_of_a_process_and_of_its_children():
    pid = os.getpid()
    with mmap.mmap(-1, 2**26) as block:
        block.write(bytes(2**26))
        assert pid in programs.process_tree(pid) and programs.proportional_bytes(pid) > 2**26
    child = "import time; x = b'1' * 2**26; time.sleep(0.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 2**26 < programs.peak_memory_of([sys.executable, "-c", parent]) < 2**28
    assert programs.proportional_bytes(2**30) == 0, "there is no such process"


def test_startup(rows_of, monkeypatch):
    seen = []
    monkeypatch.setattr(programs, "milestones", lambda line: seen.append(line) or (1.0, 2.0, len(seen)))
    rows = rows_of("startup", "--device=cpu", "--repetitions=2")
    assert [row["program"] for row in rows] == ["import torch", "train.py tiny", "accounting.py"]
    assert set(rows[0]) == {"program", "first_line_s", "first_step_s", "end_s", "spread"}
    assert [row["end_s"] for row in rows] == [5.5, 6.5, 7.5], "the first round does not count"
    config, options = flags.load(seen[1][1:], Config, TrainOptions, "")
    check(config)
    assert options.overwrite and config.max_iters == 1 and config.n_embd == 128


def test_milestones_of_a_program():
    first, step, end = programs.milestones(["-c", "print('device'); print('step 1/1 | loss')"])
    assert 0 < first <= step <= end
    assert programs.milestones(["-c", "pass"])[:2] == (None, None)
    with pytest.raises(ConfigError, match="failed"):
        programs.milestones(["-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_startup_of_the_programs_as_they_are(rows_of):
    rows = rows_of("startup", "--device=cpu", "--repetitions=1")
    assert [row["first_line_s"] is None for row in rows] == [True, False, False]
    assert [row["first_step_s"] is None for row in rows] == [True, False, True]
