"""Several processes: the results come in order, whatever fails is said here, and none outlives its block."""

import functools
import multiprocessing
import subprocess
import sys

import pytest

from cli.errors import ConfigError
from config import ROOT
from data import encode, prepare, workers
from data.prepare import main
from tests.data.corpora import TRICKY, error_of, names, write


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe:300"])
def test_any_number_of_workers_writes_the_same(gpt2_vocabulary, tmp_path, monkeypatch, kind):
    write(tmp_path / "in", **{f"doc{i}": f"{i} {TRICKY * (i % 7)}" for i in range(40)})
    monkeypatch.setattr(encode, "BUNDLE", 300)
    written = []
    for n in (1, 2, 3):
        out = tmp_path / str(n) / "out"
        assert main([str(out), f"--input={tmp_path / 'in'}", f"--tokenizer={kind}", f"--workers={n}"]) == 0
        written.append({file: (out / file).read_bytes() for file in names(out)})
        assert not multiprocessing.active_children()
    assert written[0] == written[1] == written[2] and len(written[0]) == 3


def test_as_a_script_several_processes_end_by_themselves_and_write_what_one_writes(tmp_path):
    """A process that is spawned imports the script again, and must not do its work again."""
    write(tmp_path / "in", **{f"doc{i}": f"{i} {TRICKY * 20}" for i in range(20)})
    written = []
    for n in (1, 3):
        out = tmp_path / str(n) / "out"
        argv = [ROOT / "data" / "prepare.py", out, f"--input={tmp_path / 'in'}", f"--workers={n}"]
        done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 3
        written.append({file: (out / file).read_bytes() for file in names(out)})
    assert written[0] == written[1] and len(written[0]) == 3


def test_results_come_in_order_and_items_are_taken_as_they_are_needed():
    powers, taken = [300_000, 1, 2, 200_000, 3, *range(100)], []
    with workers.pool(2) as spread:
        raised = spread(functools.partial, pow, 3)(taken.append(power) or power for power in powers)
        for i, result in enumerate(raised):
            assert result == 3 ** powers[i] and len(taken) <= i + 2 * workers.AHEAD
    assert taken == powers


def test_an_exception_in_a_worker_is_raised_here():
    with workers.pool(2) as spread:
        raised = spread(functools.partial, pow, 3)([1, 2, "x"])
        assert [next(raised), next(raised)] == [3, 9]
        with pytest.raises(TypeError, match="unsupported operand"):
            next(raised)
    with pytest.raises(ConfigError, match="lacks 'Z'"), workers.pool(2) as spread:
        list(spread(encode.encoder, {"kind": "char", "chars": "abc"})([["a", "b"], ["c", "Z"]]))
    assert not multiprocessing.active_children()


def test_a_mistake_found_by_a_worker_is_one_line(tmp_path, monkeypatch, capsys):
    write(tmp_path / "in", a="one", b="two é")
    scan = prepare.scan

    def too_few_characters(*args):
        sha256, lengths, characters = scan(*args)
        return sha256, lengths, characters - {"é"}

    monkeypatch.setattr(prepare, "scan", too_few_characters)
    argv = (tmp_path / "out", f"--input={tmp_path / 'in'}", "--tokenizer=char", "--workers=2")
    assert "characters lacks 'é'" in error_of(capsys, *argv)
    assert names(tmp_path) == ["in", "in/a.txt", "in/b.txt"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_dies_is_one_line(tmp_path, monkeypatch, capsys, count):
    write(tmp_path / "in", **{f"doc{i}": TRICKY * 20 for i in range(10)})
    monkeypatch.setattr(encode, "BUNDLE", 300)
    before, write_tokens = names(tmp_path), prepare.write_tokens

    def after_a_death(*args):
        for process in multiprocessing.active_children()[:count]:
            process.kill()
        return write_tokens(*args)

    monkeypatch.setattr(prepare, "write_tokens", after_a_death)
    message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}", "--workers=2")
    assert "a worker process died" in message and "--workers=1" in message
    assert names(tmp_path) == before and not multiprocessing.active_children()
