"""The pictures of a run: what they show against the fold it comes from, which are written, what is said otherwise."""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import report
from config import Config, dump, resolve
from hardware import Device, accelerator
from prediction import Timeline, predict
from schedule import schedule

ROOT = Path(__file__).resolve().parents[1]
CPU = Device("a CPU, 2 threads", "cpu", 2**34, {"float32": 1e11}, 2e10, "measured here", ("float32",))
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
ONE = {**SMALL, "gradient_accumulation_steps": 1}
SHAPES = {
    "gpt2": {"bias": True},
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    "dropout": {"dropout": 0.1, "attn_dropout": 0.1},
    "mlp": {"model": "mlp"},
    "deep": {"n_layer": 9},
}
FILES = ["memory.png", "roofline.png", "loss.png", "mfu.png"]


def config_of(device=CPU, **settings):
    return resolve(Config(**{**ONE, **settings}), device)


def record(step, **figures):
    return {"step": step, "loss": 5.7 - step / 50, "lr": 1e-3, "grad_norm": 1.0, "step_s": 0.01,
            "tokens_per_s": 9600.0, "mfu": 0.3, **figures}  # fmt: skip


RECORDS = [
    record(0, step_s=None, tokens_per_s=None, mfu=None),
    *(record(step) for step in range(1, 120)),
    record(120, loss=None),  # its loss was not finite
    {"step": 100, "val_loss": 4.0, "val_bpb": None},
    {"step": 121, "val_loss": None, "val_bpb": None},
]


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a run's folder."""

    def write(device=CPU, records=RECORDS, measured=None, settings=None, without=()):
        config = config_of(device, **(settings or {}))
        prediction = predict(config, device)
        found = {"peak_bytes": prediction["memory"]["peak"] + 999, "step_s": 0.01, "timeline": None, **(measured or {})}
        content = {"prediction": prediction, "measured": found, "device": dataclasses.asdict(device)}
        content = {key: value for key, value in content.items() if key not in without}
        (tmp_path / "config.py").write_text(dump(config, "a run"), encoding="utf-8")
        (tmp_path / "ledger.json").write_text(json.dumps(content), encoding="utf-8")
        lines = "".join(json.dumps(r) + "\n" for r in records)
        (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
        return tmp_path

    return write


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


def axes_of(draw, folder):
    """Return the axes that a picture was drawn into, to look at the numbers in it."""
    axes = report.Figure().add_subplot()
    assert draw(report.read_run(folder), axes) is None
    return axes


# --- the numbers


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_layers_add_up_to_the_bytes_alive(shape, accumulation, whole):
    s = schedule(config_of(gradient_accumulation_steps=accumulation, **SHAPES[shape]), CPU, whole=whole)
    timeline, layers = report.memory_layers(s)
    sums = [sum(column) for column in zip(*layers.values(), strict=True)]
    assert sums == timeline.live == Timeline(s).live and max(sums) == timeline.peak
    assert timeline.peak == predict(s.config, CPU)["memory"]["peak"]
    at_peak = {category: layer[sums.index(timeline.peak)] for category, layer in layers.items()}
    assert {c: n for c, n in at_peak.items() if n} == predict(s.config, CPU)["memory"]["at_peak"]
    assert set(layers) <= set(report.LAYERS)  # each has a colour


@pytest.mark.parametrize("peak, bandwidth", [(1e11, 2e10), (None, 2e10), (1e11, None)])
def test_operations_run_in_order_and_fill_the_step(peak, bandwidth):
    ops = schedule(config_of(gradient_accumulation_steps=4), CPU, whole=True).ops
    order, edges = report.as_run(ops, peak, bandwidth)
    assert len(order) == sum(op.times for op in ops) == len(edges) - 1
    phases = [phase for phase, _ in itertools.groupby(ops[i].phase for i in order)]
    assert phases == ["forward", "backward"] * 4 + ["optimizer"]
    assert edges[0] == 0 and edges[-1] == 1 and edges == sorted(edges)
    if peak and bandwidth:
        least = predict(config_of(gradient_accumulation_steps=4), CPU)["time"]["least_s"]
        shares = [ops[i].least_seconds(peak, bandwidth) / least for i in order]
    else:
        shares = [1 / len(order)] * len(order)
    widths = [right - left for left, right in itertools.pairwise(edges)]
    assert widths == pytest.approx(shares, abs=1e-9)


def test_a_smoothed_curve_has_no_lag_and_no_holes():
    line = [float(i) for i in range(100)]
    assert report.smooth(line, 10)[:95] == line[:95]
    assert report.smooth([math.nan, 2.0, math.nan, 4.0, 4.0], 2)[1:] == [2.0, 3.0, 4.0, 4.0]
    assert math.isnan(report.smooth([math.nan, 2.0], 2)[0]) and report.smooth([], 2) == []


# --- the pictures


def test_the_command_writes_four_pictures_and_their_paths(run, capsys):
    assert drawn(run(), capsys) == (FILES, [])


def test_the_top_of_the_stack_is_what_is_alive(run):
    folder = run(settings={"n_layer": 3})
    axes = axes_of(report.draw_memory, folder)
    top = max(collection.get_paths()[0].vertices[:, 1].max() for collection in axes.collections)
    assert math.isclose(top * 2**20, predict(config_of(n_layer=3), CPU)["memory"]["peak"])
    texts = {text.get_text() for text in axes.texts}
    assert {"forward", "backward", "optimizer"} <= texts and any("predicted peak" in text for text in texts)


def test_the_measured_curve_is_drawn_where_there_is_one_and_else_its_peak(run):
    curve = [[0.0, 2**20], [0.5, 3 * 2**20], [1.0, 2**20]]
    axes = axes_of(report.draw_memory, run(measured={"timeline": curve}))
    (line,) = (line for line in axes.lines if line.get_label() == "measured")
    assert line.get_xydata().tolist() == [[0, 1], [0.5, 3], [1, 1]]
    axes = axes_of(report.draw_memory, run(measured={"peak_bytes": 5 * 2**20}))
    (line,) = (line for line in axes.lines if line.get_label() == "measured peak")
    assert list(line.get_ydata()) == [5, 5]


def test_the_step_stands_at_what_was_measured(run):
    axes = axes_of(report.draw_roofline, run())
    points = {c.get_label().split(":")[0]: c.get_offsets()[0].tolist() for c in axes.collections if c.get_label()}
    flops = predict(config_of(), CPU)["flops"]["per_step"]
    assert points["the whole step, measured"][1] == flops / 0.01
    intensity, _ = points["the whole step, at most"]
    assert points["the whole step, measured"][0] == intensity
    assert {"forward attention", "backward mlp", "forward head"} <= set(points)
    for name, (x, y) in points.items():
        assert name.endswith("measured") or y <= min(1e11, 2e10 * x) * (1 + 1e-9)


def test_what_is_not_finite_is_left_out_of_the_curves(run):
    axes = axes_of(report.draw_loss, run())
    losses, smoothed, evaluations = (line.get_ydata() for line in axes.lines)
    assert len(losses) == 121 and math.isnan(losses[-1]) and not any(map(math.isnan, smoothed))
    assert evaluations[0] == 4.0 and math.isnan(evaluations[1])


@pytest.mark.parametrize("accumulation", [2, 4])
def test_many_micro_steps(run, capsys, accumulation):
    assert drawn(run(settings={"gradient_accumulation_steps": accumulation}), capsys) == (FILES, [])


def test_a_large_model_on_a_card(run, capsys):
    wide = {"n_layer": 4, "n_embd": 2048, "n_head": 16, "block_size": 1024, "vocab_size": 50304}
    assert drawn(run(accelerator("h100-sxm"), settings=wide), capsys) == (FILES, [])


# --- what is not there


def test_an_older_run_whose_ledger_names_no_device(run, capsys):
    names, notes = drawn(run(without=["device"]), capsys)
    assert names == ["memory.png", "loss.png", "mfu.png"]
    assert notes == ["roofline.png left out: ledger.json names no device with its peak in float32 and its bandwidth"]


@pytest.mark.parametrize("missing", ["peak_flops", "bandwidth"])
def test_a_device_of_which_too_little_is_known(run, capsys, missing):
    device = dataclasses.replace(CPU, **{missing: {} if missing == "peak_flops" else None})
    records = RECORDS if missing == "bandwidth" else [r | {"mfu": None} if "mfu" in r else r for r in RECORDS]
    names, notes = drawn(run(device, records), capsys)
    assert "roofline.png" not in names and ("mfu.png" in names) == (missing == "bandwidth")
    if missing == "peak_flops":
        assert notes[1:] == ["mfu.png left out: the device's peak is not known"]


def test_a_run_that_has_just_begun(run, capsys):
    folder = run(records=[])
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
def test_no_loss_that_is_finite(run, capsys, records):
    names, notes = drawn(run(records=records), capsys)
    assert "loss.png" not in names and notes == ["loss.png left out: metrics.jsonl has no loss yet"]


def test_steps_of_two_machines_have_no_common_axis_of_tokens(run, capsys):
    names, notes = drawn(run(records=[record(0), record(1, mfu=0.2)]), capsys)
    assert names == FILES
    assert notes == ["mfu.png has no tokens/s: not all steps were held against the same peak"]


def test_a_prediction_of_another_version_is_not_passed_over(run, capsys):
    folder = run()
    ledger = json.loads((folder / "ledger.json").read_text(encoding="utf-8"))
    ledger["prediction"]["memory"]["peak"] = 2**20
    (folder / "ledger.json").write_text(json.dumps(ledger), encoding="utf-8")
    (line,) = drawn(folder, capsys)[1]
    assert line.startswith("memory.png has the peak that this version predicts") and line.endswith("1.0 MiB")


# --- mistakes


def refused(argv, capsys):
    """Return the one line on stderr of a command that is refused."""
    assert report.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_a_folder_that_is_no_run(tmp_path, capsys):
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
        ("metrics.jsonl", '{"step": null}\n', "metrics.jsonl:1: its step is no number"),
        ("config.py", "n_layer = \n", "config.py:1: not Python syntax"),
    ],
)
def test_a_damaged_file(run, capsys, file, text, words):
    folder = run()
    (folder / file).write_text(text, encoding="utf-8")
    assert words in refused([str(folder)], capsys)


@pytest.mark.parametrize("argv", [[], ["out", "out-2"]])
def test_one_folder_is_wanted(argv, capsys):
    assert "one run's folder is wanted" in refused(argv, capsys)


def test_a_picture_that_cannot_be_written(run, capsys):
    folder = run()
    (folder / "memory.png").mkdir()
    assert "memory.png: cannot be written" in refused([str(folder)], capsys)


def test_without_matplotlib(run):
    code = "import sys; sys.modules['matplotlib'] = None; import report; sys.exit(report.main(sys.argv[1:]))"
    ended = subprocess.run([sys.executable, "-c", code, str(run())], cwd=ROOT, capture_output=True, text=True)
    said = "error: report.py draws with matplotlib, which is not installed: pip install matplotlib\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)
