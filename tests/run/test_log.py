"""The log of a run: metrics.jsonl, the live line, Weights & Biases, and the ledger of predicted against measured."""

import dataclasses
import itertools
import json
import math
import re
import sys
import time
import types
from importlib.machinery import ModuleSpec

import pytest

import train
from run import checkpoint, ledger
from run.log import STEADY_STEPS
from tests.training import PEAK, STEP_KEYS, files_and_times, read_metrics

# --- a line per step


@pytest.mark.parametrize("log_interval", [1, 3])
def test_metrics_have_the_documented_keys_and_a_line_per_step(run, tmp_path, log_interval):
    printed = run(max_iters=8, log_interval=log_interval, eval_interval=4)
    steps, evaluations = read_metrics(tmp_path / "out")
    assert [r["step"] for r in steps] == list(range(8))
    assert all(r.keys() == STEP_KEYS for r in steps)
    assert [r["step_s"] is None for r in steps] == [True] + [False] * 7  # the first step is a profiled warm-up
    assert [r["mfu"] is None for r in steps] == [r["tokens_per_s"] is None for r in steps] == [True] + [False] * 7
    assert all(r["peak_source"] == "a test" and r["memory_bytes"] > 2**20 and r["data_wait_s"] >= 0 for r in steps)
    assert [r["step"] for r in evaluations] == [4, 8]
    for record in evaluations:
        assert record.keys() == {"step", "val_loss", "val_bpb"}
        assert record["val_bpb"] == pytest.approx(record["val_loss"] / math.log(2) / 2)  # two bytes a token
    shown = re.findall(r"^step (\d)/8 \| loss", printed, re.M)
    # Each step is shown, or each third and those that evaluations and the ledger ask for.
    assert shown == (list("12345678") if log_interval == 1 else list("123468"))
    assert "step 1/8" in printed and "warming up" in printed.split("step 2/8")[0]


def test_a_cut_off_last_line_of_the_log_is_dropped(run, tmp_path):
    run(max_iters=3)
    with (tmp_path / "out" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 5.1}\n{"step": 4, "lo')
    run("--init_from=resume", max_iters=5)
    steps, _ = read_metrics(tmp_path / "out")
    assert [r["step"] for r in steps] == list(range(5)) and all(r.keys() == STEP_KEYS for r in steps)


def test_a_terminal_sees_one_live_line(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printed = run(max_iters=3)
    assert printed.count("\r\x1b[Kstep 2/3 | loss") == 1 and "\nstep 2/3" not in printed
    assert "\r\x1b[Kstep 3 | validation loss" in printed  # in place of the live line


@pytest.mark.parametrize("log_interval", [1, 3])
def test_evaluating_and_saving_are_not_in_the_step_time(run, tmp_path, monkeypatch, log_interval):
    save = checkpoint.save

    def slow(result):
        time.sleep(0.2)
        return result

    monkeypatch.setattr(train, "evaluate", lambda *args: slow(1.0))
    monkeypatch.setattr(checkpoint, "save", lambda *args: slow(save(*args)))
    run(max_iters=6, eval_interval=1, log_interval=log_interval)
    times = [r["step_s"] for r in read_metrics(tmp_path / "out")[0]]
    assert len(times) == 6 and times[0] is None and all(0 < t < 0.2 for t in times[1:])


def test_waiting_for_data_is_measured_and_in_the_step_time(run, tmp_path, monkeypatch):
    following = train.Loader.next

    def slow(self):
        time.sleep(0.1)
        return following(self)

    monkeypatch.setattr(train.Loader, "next", slow)
    run(max_iters=6, gradient_accumulation_steps=2, log_interval=10)  # so that the last four steps share a clock
    for record in read_metrics(tmp_path / "out")[0][1:]:
        assert record["data_wait_s"] >= 0.2 and 0.2 <= record["step_s"] < 0.4


# --- Weights & Biases


def test_wandb_gets_the_same_lines(run, tmp_path, monkeypatch):
    logged, finished = [], []
    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init = lambda project, name: types.SimpleNamespace(
        log=lambda record, step: logged.append(record), finish=lambda: finished.append((project, name))
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(wandb_log=True, wandb_project="p", wandb_run_name="r")
    steps, evaluations = read_metrics(tmp_path / "out")
    assert logged == steps + evaluations and finished == [("p", "r")]


def test_missing_wandb_is_noticed_before_anything_is_discarded(run, tmp_path, monkeypatch):
    run(max_iters=2)
    before = files_and_times(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it now fails
    error = run("--overwrite", wandb_log=True, status=2)
    assert error == "error: wandb_log=True needs the wandb package; --wandb_log=False logs without it\n"
    assert files_and_times(tmp_path) == before


# --- the ledger


def test_the_ledger_holds_the_prediction_against_the_run(run, tmp_path):
    printed = run("--mfu=1e-7", max_iters=7, n_layer=3, n_embd=96, n_head=4, block_size=64, batch_size=8)
    early, last = "predicted and measured after step 2", "predicted and measured at the end"
    assert printed.count(early) == printed.count(last) == 1
    assert printed.index("step 2/7") < printed.index(early) < printed.index("step 3/7") < printed.index(last)
    content = json.loads((tmp_path / "out" / "ledger.json").read_text(encoding="utf-8"))
    assert content.keys() == {"when", "note", "rows", "device", "prediction", "measured"}
    assert content["when"] == "at the end"
    rows = {row["figure"]: row for row in content["rows"]}
    assert list(rows) == ["peak memory", "FLOPs per step", "step time", "tokens/s", "MFU", "checkpoint", "resident"]
    assert rows["peak memory"]["ratio"] == pytest.approx(1, abs=0.01) and rows["peak memory"]["within"]
    assert rows["peak memory"]["measured"] > 10 * 2**20
    curve = content["measured"]["timeline"]
    assert max(n_bytes for _, n_bytes in curve) == rows["peak memory"]["measured"] and 20 < len(curve) <= 100
    assert all(0 <= a < b < 1 for (a, _), (b, _) in itertools.pairwise(curve))
    assert content["measured"]["resident_bytes"] > rows["peak memory"]["measured"]
    assert rows["FLOPs per step"]["ratio"] == 1 and rows["FLOPs per step"]["measured"] > 0
    assert rows["step time"]["measured"] == content["measured"]["step_s"]
    flops = content["prediction"]["flops"]["per_step"]
    assert rows["MFU"]["measured"] == pytest.approx(flops / (content["measured"]["step_s"] * PEAK))
    assert not rows["step time"]["within"]  # nothing is as slow as this --mfu has it
    marked = [line for line in printed.split(last)[1].splitlines() if "outside 1" in line]
    marked = [line for line in marked if not line.startswith("  resident")]  # of a process that also runs tests
    assert [line.split()[0] for line in marked] == ["step", "tokens/s", "MFU"]
    assert all("--mfu" in line for line in marked)
    first = printed.split(early)[1].split("step 3/7")[0].splitlines()
    assert [line.split()[0] for line in first if line.endswith("  so far")] == ["step", "tokens/s", "MFU", "resident"]
    assert "outside 1" not in "".join(first)  # memory and FLOPs are right at once, and times not judged yet


def test_a_run_of_few_steps_does_not_judge_its_times(run):
    printed = run("--mfu=1e-7", max_iters=STEADY_STEPS)  # the first is profiled, and not timed
    assert "outside 1" not in printed and printed.count("  so far") == 8
    assert run("--mfu=1e-7", "--overwrite", max_iters=STEADY_STEPS + 1).count("--mfu is not what this machine") == 3


@pytest.mark.parametrize("source", ["measured here: matmul of 2048 cubed", "the vendor's datasheet"])
def test_a_step_faster_than_the_peak_raises_it_in_the_file_too(run, tmp_path, monkeypatch, local_file, source):
    low = 1e4  # FLOP/s, as a ceiling may be that was measured beside a busy program
    monkeypatch.setattr(
        "run.preflight.with_measured_peak",
        lambda spec, device, dtype: dataclasses.replace(spec, peak_flops={dtype: low}, source=source),
    )
    printed = run(max_iters=8)
    utilisations = [float(text) for text in re.findall(r"MFU +([\d.]+)%", printed)]
    assert utilisations and max(utilisations) <= 100
    steps, _ = read_metrics(tmp_path / "out")
    assert max(r["mfu"] for r in steps if r["mfu"]) <= 1
    (kept,) = json.loads(local_file.read_text(encoding="utf-8")).values()
    flops = json.loads((tmp_path / "out" / "ledger.json").read_text(encoding="utf-8"))["measured"]["flops_per_step"]
    assert kept["peak_flops"]["float32"] == pytest.approx(max(flops / r["step_s"] for r in steps if r["step_s"]))
    assert kept["source"].endswith("measured here: a training step") and ("vendor" in source) == (
        "vendor" in kept["source"]
    )


def test_a_row_outside_its_band_is_marked():
    prediction = {
        "memory": {"peak": 10**9, "checkpoint": 2 * 10**9},
        "flops": {"per_step": 400, "hardware_per_step": 400, "tokens_per_step": 100},
        "time": {"step_s": 1.0, "tokens_per_s": 100.0, "mfu": 0.4, "peak_flops": 1000.0,
                 "basis": "assumed", "band": 0.5},
    }  # fmt: skip

    def verdicts(compiled=False, **measured):
        measured = {"peak_bytes": None, "flops_per_step": None, "step_s": None, "checkpoint_bytes": None} | measured
        rows = ledger.compare(prediction, measured, compiled)
        lines = list(ledger.table(rows, "now", ""))[2:]
        assert [row["within"] for row in rows] == ["outside" not in line for line in lines]
        return [row["within"] for row in rows]

    million = 10**6
    assert verdicts(peak_bytes=1049 * million) == verdicts(peak_bytes=951 * million) == [True]
    assert verdicts(peak_bytes=1051 * million) == verdicts(peak_bytes=949 * million) == [False]
    assert verdicts(compiled=True, peak_bytes=300) == [True]
    assert verdicts(compiled=True, peak_bytes=1051 * million) == [False]
    assert verdicts(flops_per_step=400) == [True] and verdicts(flops_per_step=401) == [False]
    assert verdicts(step_s=1.4) == [True, True, True] and verdicts(step_s=1.6) == [False, True, True]
    assert verdicts(compiled=True, step_s=0.3) == [True] * 3 and verdicts(compiled=True, step_s=1.6)[0] is False
    prediction["time"] |= {"basis": "timed", "band": 0.15}
    assert verdicts(step_s=1.14) == [True] * 3
    assert verdicts(step_s=1.16)[0] is verdicts(step_s=0.84)[0] is False
    assert verdicts(checkpoint_bytes=2099 * million) == [True]
    assert verdicts(checkpoint_bytes=2101 * million) == [False]
    prediction["memory"]["peak"] = 10**5  # a model so small that a few KB of headers or scratch outweigh the band
    assert verdicts(peak_bytes=10**5 + 2**16 - 1) == [True] and verdicts(peak_bytes=10**5 + 2**16) == [False]
    assert verdicts() == []
