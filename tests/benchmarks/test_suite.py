"""The commands train, optimizer, loader and decode: what they print and record. No times are checked."""

import contextlib
import json

import numpy as np

from benchmarks import __main__, records, suite, turns
from model import build

TINY = ["--device=cpu", "--shape=tiny"]
SPREAD = {"spread", "ratio", "ratio_spread"}


def test_train_compared_with_nanogpt_and_its_record(checkout, rows_of, quick, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    argv = ["train", *TINY, "--steps=1", "--repetitions=2", f"--peer={checkout}", "--record=here"]
    (row,) = rows_of(*argv)
    keys = {"shape", "dtype", "tokens_per_s", "step_s", "mfu", "peak_bytes", *SPREAD}
    assert set(row) == keys | {"peer_tokens_per_s", "peer_peak_bytes", "memory_ratio"}
    assert row["shape"] == "tiny" and np.isclose(row["tokens_per_s"] * row["step_s"], 12 * 64)
    assert np.isclose(row["memory_ratio"], row["peak_bytes"] / row["peer_peak_bytes"])
    record = json.loads((tmp_path / "records" / "here.json").read_text(encoding="utf-8"))
    assert set(record) == {"commit", "command", "date", "environment", "rows"} and record["rows"] == [row]
    assert record["command"].startswith("python -m benchmarks train --device=cpu --shape=tiny")
    assert "--peer=PATH" in record["command"] and str(checkout) not in json.dumps(record)
    assert set(record["environment"]) == {"device", "torch", "threads", "peer"}


def test_train_prints_a_table(capsys, quick):
    assert __main__.main(["train", *TINY, "--steps=1", "--repetitions=1"]) == 0
    _, titles, row = capsys.readouterr().out.splitlines()
    assert titles.split() == ["shape", "dtype", "tokens_per_s", "step_s", "spread", "mfu", "peak_bytes"]
    assert row.startswith("tiny") and len(row) == len(titles) and row.endswith("MiB")


def test_optimizer(rows_of, config_of):
    (row,) = rows_of("optimizer", *TINY, "--steps=1", "--repetitions=2")
    assert set(row) == {"shape", "parameters", "step_s", "fused_s", "foreach_s", "foreach_ratio", *SPREAD}
    assert row["parameters"] == sum(p.numel() for p in build(config_of("x/y")).parameters())


def test_loader(checkout, rows_of, quick):
    argv = ["loader", "--device=cpu", "--steps=2", "--repetitions=2", "--gigabytes=1e-3"]
    (row,) = rows_of(*argv, f"--peer={checkout}")
    assert set(row) == {"shape", "file_bytes", "batch_s", "peer_batch_s", *SPREAD} and row["file_bytes"] == 10**6


def test_decode_generates_the_same_tokens_as_nanogpt_with_the_same_weights(checkout, rows_of, quick):
    rows = rows_of("decode", *TINY, "--dtype=float32", "--repetitions=1", f"--peer={checkout}")
    (row,) = rows  # one dtype
    keys = {"shape", "dtype", "tokens_per_s", "seconds", "prefill_s", "step_s", "mbu", *SPREAD}
    assert set(row) == keys | {"peer_tokens_per_s", "same_tokens"} and row["same_tokens"] is True


def test_without_a_peer_its_columns_are_absent(rows_of, quick, monkeypatch):
    figures = {"seconds": 1.0, "peak_bytes": 1, "prefill_s": 0.5, "step_s": 0.1, "tokens": []}

    class Fake:
        turn = staticmethod(lambda n: figures)

    monkeypatch.setattr(turns, "BenchProcess", lambda *_: contextlib.nullcontext(Fake()))
    for name in ("train", "loader", "decode"):
        for row in rows_of(name, "--device=cpu", *(["--gigabytes=1e-3"] if name == "loader" else [])):
            assert "spread" in row and not [key for key in row if "peer" in key or "ratio" in key]


def test_no_utilisation_exceeds_1():
    assert suite.utilisation([5.0, 6.0, 30.0], [10.0, 10.0, 10.0]) == 0.6
    assert suite.utilisation([15.0, 20.0], [10.0, 10.0]) == 1.0
