"""Versions that are too old are named at the start, with what is needed."""

import importlib.metadata
import re
import subprocess
import sys

import pytest

from cli import errors, packages
from config import ROOT

COMMANDS = ["train.py", "accounting.py", "sample.py", "data/prepare.py"]
OLD_PYTHON = """
import runpy, sys
sys.version_info, sys.version = (3, 10, 13, "final", 0), "3.10.13 (main)"
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_an_old_python_is_told_by_every_command(command):
    argv = [sys.executable, "-c", OLD_PYTHON, str(ROOT), str(ROOT / command), "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: Python 3.11 or newer is needed; this is 3.10.13\n"


@pytest.mark.parametrize(
    "found, good",
    [("2.8.9", False), ("1.13.1+cu117", False), ("2.9.0", True), ("2.10.0a0+git1", True), ("2.13.0+cpu", True),
     ("3.0", True)],
)  # fmt: skip
def test_a_package_older_than_required_is_named(monkeypatch, tmp_path, found, good):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    monkeypatch.setattr(packages, "REQUIREMENTS", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_text("numpy\ntorch>=2.9\n", encoding="utf-8")
    message = f"torch {found} is too old: 2.9 or newer is needed; pip install -r requirements.txt"
    assert packages.too_old("torch") == (None if good else message)
    assert packages.too_old("numpy") is None  # any version will do
    (tmp_path / "requirements.txt").unlink()
    assert packages.too_old("torch") is None


def test_a_missing_package_is_not_called_old():
    assert packages.too_old("no-such-package") is None


def test_what_is_required_is_installed_here_and_a_least_version_is_one_that_is_checked():
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    bounded = re.findall(r"^(\w+)>=", text, re.M)
    assert set(bounded) == {"torch", "tokenizers"} and not any(map(packages.too_old, bounded))
    sources = [(ROOT / file).read_text(encoding="utf-8") for file in ("cli/errors.py", "data/tokenizer.py")]
    assert all(f'too_old("{name}")' in "".join(sources) for name in bounded)


def test_a_script_exits_where_torch_is_too_old_before_it_imports_torch(monkeypatch, capsys):
    monkeypatch.setattr(errors, "too_old", lambda name: f"{name} 1.0 is too old")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as exit:
        errors.exit_on_mistake(lambda argv: None)
    assert exit.value.code == 2 and capsys.readouterr() == ("", "error: torch 1.0 is too old\n")
