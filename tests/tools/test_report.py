"""The command tools.report: which files it writes, what it says of those it leaves out, and mistakes."""

import dataclasses
import json
import subprocess
import sys

import pytest

from config import ROOT
from hardware.accelerators import accelerator
from tests.tools.small_run import CPU, RECORDS, record
from tools import report

FILES = ["memory.png", "roofline.png", "loss.png", "mfu.png"]


def drawn(folder, capsys):
    """Return (names of the files whose paths were printed, notes), having checked that these and no others are PNGs."""
    assert report.main([str(folder)]) == 0
    printed = capsys.readouterr()
    names = [line.removeprefix(f"{folder}/") for line in printed.out.splitlines()]
    assert sorted(names) == sorted(path.name for path in folder.glob("*.png"))
    for name in names:
        data = (folder / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 5000
        assert [int.from_bytes(data[at : at + 4]) for at in (16, 20)] == [960, 540]
    return names, printed.err.splitlines()


def test_the_command_writes_four_pictures_and_their_paths(run_folder, capsys):
    assert drawn(run_folder(), capsys) == (FILES, [])


@pytest.mark.parametrize("accumulation", [2, 4])
def test_many_micro_steps(run_folder, capsys, accumulation):
    assert drawn(run_folder(settings={"gradient_accumulation_steps": accumulation}), capsys) == (FILES, [])


def test_a_large_model_on_a_card(run_folder, capsys):
    wide = {"n_layer": 4, "n_embd": 2048, "n_head": 16, "block_size": 1024, "vocab_size": 50304}
    assert drawn(run_folder(accelerator("h100-sxm"), settings=wide), capsys) == (FILES, [])


# --- what is not there


def test_an_older_run_whose_ledger_names_no_device(run_folder, capsys):
    names, notes = drawn(run_folder(without=["device"]), capsys)
    assert names == ["memory.png", "loss.png", "mfu.png"]
    assert notes == ["roofline.png left out: ledger.json does not give the device's peak in float32 and its bandwidth"]


@pytest.mark.parametrize("missing", ["peak_flops", "bandwidth"])
def test_a_device_of_which_too_little_is_known(run_folder, capsys, missing):
    device = dataclasses.replace(CPU, **{missing: {} if missing == "peak_flops" else None})
    records = RECORDS if missing == "bandwidth" else [r | {"mfu": None} if "mfu" in r else r for r in RECORDS]
    names, notes = drawn(run_folder(device, records), capsys)
    assert "roofline.png" not in names and ("mfu.png" in names) == (missing == "bandwidth")
    if missing == "peak_flops":
        assert notes[1:] == ["mfu.png left out: the device's peak is not known"]


def test_a_run_that_has_just_begun(run_folder, capsys):
    folder = run_folder(records=[])
    (folder / "ledger.json").unlink()
    names, notes = drawn(folder, capsys)
    assert names == ["memory.png"]
    assert notes[1] == "loss.png left out: metrics.jsonl has no loss yet"
    assert notes[2] == "mfu.png left out: metrics.jsonl has no MFU yet"
    (folder / "metrics.jsonl").write_text(json.dumps(RECORDS[0]) + "\n" + '{"step": 1, "lo', encoding="utf-8")
    assert drawn(folder, capsys)[0] == ["memory.png", "loss.png"]
    (folder / "metrics.jsonl").unlink()
    (folder / "loss.png").unlink()
    assert drawn(folder, capsys)[0] == ["memory.png"]


@pytest.mark.parametrize("records", [[record(0, loss=None)], [record(0, loss=None), {"step": 1, "val_loss": None}]])
def test_no_loss_that_is_finite(run_folder, capsys, records):
    names, notes = drawn(run_folder(records=records), capsys)
    assert "loss.png" not in names and notes == ["loss.png left out: metrics.jsonl has no loss yet"]


def test_steps_of_two_machines_have_no_common_axis_of_tokens(run_folder, capsys):
    names, notes = drawn(run_folder(records=[record(0), record(1, mfu=0.2)]), capsys)
    assert names == FILES
    assert notes == ["mfu.png has no axis of tokens/s, because the MFU of the steps refers to different peaks"]


def test_a_prediction_of_another_version_is_not_passed_over(run_folder, capsys):
    folder = run_folder()
    ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
    ledger["prediction"]["memory"]["peak"] = 2**20
    (folder / "ledger.json").write_text(json.dumps(ledger), encoding="utf-8")
    (line,) = drawn(folder, capsys)[1]
    assert line.startswith("memory.png shows the peak that this version predicts") and line.endswith("1.0 MiB")


# --- mistakes


def refused(argv, capsys):
    """Return the one line on stderr of a command that is refused."""
    assert report.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_a_folder_that_is_no_run_folder(tmp_path, capsys):
    said = refused([str(tmp_path / "none")], capsys)
    assert f"{tmp_path}/none/config.py: no such file; " in said and f"CONFIG.py --out_dir={tmp_path}/none" in said
    (tmp_path / "config.py").write_text("n_layer = 2\n", encoding="utf-8")
    assert "name the out_dir of a run" in refused([str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "file, text, words",
    [
        ("ledger.json", '{"when": "at the', "ledger.json: damaged"),
        ("ledger.json", "[1]", "ledger.json: damaged"),
        ("ledger.json", '{"prediction": {"memory": 1}}', "ledger.json: damaged"),
        ("ledger.json", '{"device": {"name": "x"}}', "ledger.json: damaged"),
        ("ledger.json", '{"measured": {"timeline": [1, 2]}}', "ledger.json: damaged"),
        ("metrics.jsonl", '{"step": 0}\n{"step\n{"step": 2}\n', "metrics.jsonl:2: damaged"),
        ("metrics.jsonl", '{"loss": 1.0}\n', "metrics.jsonl:1: damaged"),
        ("metrics.jsonl", "7\n", "metrics.jsonl:1: damaged"),
        ("metrics.jsonl", '{"step": null}\n', "metrics.jsonl:1: the step is not a number"),
        ("config.py", "n_layer = \n", "config.py:1: not Python syntax"),
    ],
)
def test_a_damaged_file(run_folder, capsys, file, text, words):
    folder = run_folder()
    (folder / file).write_text(text, encoding="utf-8")
    assert words in refused([str(folder)], capsys)


@pytest.mark.parametrize("argv", [[], ["out", "out-2"]])
def test_one_folder_is_wanted(argv, capsys):
    assert "give the folder of one run" in refused(argv, capsys)


def test_a_picture_that_cannot_be_written(run_folder, capsys):
    folder = run_folder()
    (folder / "memory.png").mkdir()
    assert "memory.png: cannot be written" in refused([str(folder)], capsys)


def test_without_matplotlib(run_folder):
    code = "import sys; sys.modules['matplotlib'] = None; from tools import report; sys.exit(report.main(sys.argv[1:]))"
    ended = subprocess.run([sys.executable, "-c", code, str(run_folder())], cwd=ROOT, capture_output=True, text=True)
    said = "error: tools.report draws with matplotlib, which is not installed: pip install matplotlib\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)
