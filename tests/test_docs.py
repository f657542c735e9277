"""The README's figures and commands, the configs' docstrings, and what is claimed of the records."""

import ast
import itertools
import json
import math
import re
import shlex

import pytest

import accounting
from benchmarks import readme
from cli.config_file import read_settings
from config import ROOT, Config, check, resolve
from estimate.predict import predict
from hardware.accelerators import accelerator
from tests.test_imports import COMMANDS, FOLDERS, MAY_IMPORT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = readme.PART.sub("", README)
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def test_the_command_that_writes_the_readmes_figures_would_change_nothing():
    assert readme.filled(README) == README
    assert set(readme.PART.findall(README)) == readme.PARTS.keys()


def test_each_part_follows_its_record(monkeypatch):
    """A part that would not change with its record would be typed by hand."""
    genuine = readme.record

    def changed(name):
        text = re.sub(r"(\d)\.(\d)", lambda m: f"{(int(m[1]) + 1) % 10}.{m[2]}", json.dumps(genuine(name)))
        return json.loads(text)

    monkeypatch.setattr(readme, "record", changed)
    for name in ("quickstart", "nanogpt"):
        part = next(match[0] for match in readme.PART.finditer(README) if match[1] == name)
        assert readme.filled(part) != part


def test_no_measured_figure_is_typed_outside_the_parts():
    text = re.sub(r"```.*?```|`[^`]*`", "", PROSE, flags=re.S).replace("Python 3.11", "")
    assert re.findall(r"\d+\.\d+", text) == []


def test_the_readme_is_short_and_its_lines_can_be_read():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 160 and not line.startswith("|")] == []


def test_the_readme_shows_the_table_of_who_may_import_whom():
    rows = re.findall(r"^\| `([\w./]+)` \| ([^|]+) \| ([^|]+) \|$", PROSE, re.M)
    assert {room: allowed.replace("-", "").strip() for room, _, allowed in rows} == MAY_IMPORT
    assert [room for room, _, _ in rows] == list(MAY_IMPORT) and set(FOLDERS) <= MAY_IMPORT.keys()
    assert all(f"`{command.replace('.', '/')}.py`" in PROSE for command in COMMANDS)


@pytest.mark.parametrize("command", re.findall(r"\| `(python accounting\.py [^`]*)` \|", README))
def test_each_question_of_the_readme_is_answered(command, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    status = accounting.main(shlex.split(command)[2:])
    printed = capfd.readouterr()
    assert printed.out and status == (
        3 if "--batch_size=64" in command else 0
    )  # that one is shown because it does not fit


def test_the_two_commands_name_files_that_are_there():
    first, second = re.search(r"```\n(pip install .*)\n(pip install .*)\n```", README).groups()
    assert first == "pip install -r requirements.txt -c constraints.txt && python train.py configs/quickstart.py"
    assert second == "pip install -r requirements-dev.txt -c constraints.txt && pytest"
    for file in re.findall(r"[\w./-]+\.(?:txt|py)", first + second):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_file_names_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = [(path.parent / link) for link in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
    files = [
        ROOT / name
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|txt|md|json))`|`(\w+\.py)`", text)
        for name in name
        if name
    ]
    places = [ROOT / "configs" / file.name if not file.exists() else file for file in files]
    assert [place for place in links + places if not place.exists()] == [] and links


def test_the_quick_start_ends_below_what_xz_needs():
    record = json.loads((ROOT / "records" / "quickstart" / "record.json").read_text(encoding="utf-8"))
    assert record["val_bpb"] < record["xz_bpb"] and record["training_seconds"] < 240
    recorded, now = (
        read_settings(ROOT / folder, Config) for folder in ("records/quickstart/config.py", "configs/quickstart.py")
    )
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
    recorded = read_settings(ROOT / "records" / "shakespeare_char" / "config.py", Config)
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
    config = Config(**read_settings(path, Config))
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
