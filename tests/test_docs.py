"""Every figure of the README and of the configs' docstrings is read from where it was recorded, or from the code."""

import ast
import contextlib
import importlib.util
import io
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest

import accounting
from config import check, load, read_file, resolve
from hardware import accelerator
from prediction import predict

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A block of output names its source in the comment before it, a figure in the comment behind it.
BLOCKS = re.findall(r"<!-- (\S[^>]*) -->\n```\n(.*?)```", README, re.S)
FIGURES = re.findall(r"([\d.,e+-]+%?)<!--(\S+):(\S+):(\S+)-->", README)
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def in_order(lines, of):
    """Return whether the lines stand in `of`, in this order, with whatever else between them."""
    rest = iter(of)
    return all(line in rest for line in lines)


@pytest.mark.parametrize("source, block", BLOCKS)
def test_a_block_of_output_is_what_was_printed(source, block):
    shown = [line for line in block.splitlines() if line.strip() != "..."]
    if source.startswith("python accounting.py"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
            assert accounting.main(shlex.split(source)[2:]) == 0
        assert shown == printed.getvalue().splitlines()
    else:
        assert shown and in_order(shown, (ROOT / source).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("shown, file, key, form", FIGURES)
def test_a_figure_is_what_was_recorded(shown, file, key, form):
    value = json.loads((ROOT / file).read_text(encoding="utf-8"))
    for part in key.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    assert shown == format(value, form)


def test_no_figure_stands_there_without_its_source():
    text = re.sub(r"```.*?```|`[^`]*`", "", README, flags=re.S)
    text = re.sub(r"[\d.,e+-]+%?<!--.*?-->", "", text)
    assert re.findall(r"\d+\.\d+", text.replace("Python 3.11", "")) == []
    assert len(BLOCKS) >= 2 and len(FIGURES) >= 3


@pytest.mark.parametrize("command", re.findall(r"\| `(python accounting\.py [^`]*)` \|", README))
def test_each_question_of_the_readme_is_answered(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    status = accounting.main(shlex.split(command)[2:])
    printed = capsys.readouterr()
    assert printed.out and status == (
        2 if "--batch_size=64" in command else 0
    )  # that one is shown because it does not fit


def test_the_two_commands_name_files_that_are_there():
    first, second = re.search(r"```\n(pip install .*)\n(pip install .*)\n```", README).groups()
    assert first == "pip install -r requirements.txt -c constraints.txt && python train.py configs/quickstart.py"
    assert second == "pip install -r requirements-dev.txt -c constraints.txt && pytest"
    for file in re.findall(r"[\w./-]+\.(?:txt|py)", first + second):
        assert (ROOT / file).exists(), file


def test_links_and_file_names_lead_somewhere():
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", README) + re.findall(r"`((?:\w+/)*\w+\.(?:py|txt))`", README)
    assert linked and [name for name in linked if not (ROOT / name).exists()] == []


def test_the_quick_start_ends_below_what_xz_needs():
    record = json.loads((ROOT / "records" / "quickstart" / "record.json").read_text(encoding="utf-8"))
    assert record["val_bpb"] < record["xz_bpb"] and record["training_seconds"] < 240
    recorded, now = (read_file(ROOT / folder) for folder in ("records/quickstart/config.py", "configs/quickstart.py"))
    assert {name: recorded[name] for name in now if name != "out_dir"} == {
        k: v for k, v in now.items() if k != "out_dir"
    }


def test_the_recipe_passes_nanogpts_run_in_less_than_half_its_time_and_its_losses_are_followed():
    record = json.loads((ROOT / "records" / "bench" / "learning.json").read_text(encoding="utf-8"))
    assert len(record["seeds"]) == 3
    for row in record["seeds"]:
        assert row["val_loss"] < min(1.898, row["peer_val_loss"]) and row["ratio"] <= 0.4
    assert len(record["steps"]["peer"]) == 50 and record["steps"]["largest_difference"] < 1e-4


def test_growth_is_recorded_for_each_axis_doubled_three_times():
    record = json.loads((ROOT / "records" / "bench" / "growth.json").read_text(encoding="utf-8"))
    (base,) = (row for row in record["rows"] if row["grown"] == "none")
    axes = ("n_embd", "n_layer", "block_size", "batch_size", "vocab_size")
    found = {(row["grown"], row["times"]): row for row in record["rows"]}
    assert found.keys() == {("none", 1), *itertools.product(axes, (2, 4, 8))}
    for (axis, times), row in found.items():
        assert {name: row[name] / base[name] for name in axes} == {name: times if name == axis else 1 for name in axes}
        assert math.isclose(row["peak_ratio"], 1, abs_tol=1e-3)
        assert math.isclose(row["step_s"], row["step_ratio"] * row["predicted_step_s"], rel_tol=1e-9)


def test_the_nanogpt_run_reaches_its_loss():
    record = json.loads((ROOT / "records" / "shakespeare_char" / "record.json").read_text(encoding="utf-8"))
    recorded = read_file(ROOT / "records" / "shakespeare_char" / "config.py")
    assert record["val_loss"] <= 1.90 and recorded["eval_iters"] is None
    settings = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12, "dropout": 0.0,
                "init": "gpt2", "max_iters": 2000, "dataset": "shakespeare_char", "tie_weights": True, "pos": "learned",
                "norm": "layernorm", "activation": "gelu", "bias": False}  # fmt: skip
    assert {name: recorded[name] for name in settings} == settings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_its_hardware_duration_loss_and_commands(path):
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    for word in ("hardware  ", "duration  ", "expected  ", f"python train.py configs/{path.name}", "python sample.py "):
        assert word in docstring, word
    config, _ = load([str(path)])
    check(config)
    assert f"python sample.py {config.out_dir}" in docstring
    predicted = re.search(r"predicted: ([\d.]+) days on one (\S+) at 40 % MFU", docstring)
    if predicted:
        days, gpu = predicted.groups()
        resolved = resolve(config, accelerator(gpu))
        prediction = predict(resolved, accelerator(gpu), mfu=0.4)
        assert math.isclose(prediction["time"]["total_s"] / 86400, float(days), abs_tol=0.05) and prediction["fits"]
    else:
        record = json.loads((ROOT / "records" / path.stem / "record.json").read_text(encoding="utf-8"))
        assert (
            f"{record['val_loss']:.2f}" in docstring and f"{record['training_seconds'] / 60:.1f} minutes" in docstring
        )


def test_the_figure_of_xavier_is_what_the_code_does():
    spec = importlib.util.spec_from_file_location("figure", ROOT / "records" / "init" / "figure.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    recorded = json.loads((ROOT / "records" / "init" / "variance.json").read_text(encoding="utf-8"))
    for name, curve in figure.measure().items():
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(curve, recorded[name], strict=True))
    assert (ROOT / "records" / "init" / "variance.svg").read_text(encoding="utf-8") == figure.svg(recorded)
    assert len(recorded["xavier"]) == 25
    assert all(0.5 < variance < 2 for variance in recorded["xavier"])
    growth = [b / a for a, b in zip(recorded["normal"], recorded["normal"][1:], strict=False)]
    assert all(0.8 * 256 < g < 1.2 * 256 for g in growth)  # each layer multiplies by its fan_in
