"""Programs that run alternately: who has a turn when, the ratios, and processes that fail."""

import pytest

from benchmarks import __main__, turns
from cli.errors import ConfigError


def test_runs_alternate_after_some_steps_that_are_not_counted(monkeypatch):
    monkeypatch.setattr(turns, "PAUSE", 0)
    calls = []

    def run(name):
        return lambda n: calls.append((name, n)) or {"seconds": 0.25 * n}

    n, found = turns.measure_alternating([run("a"), run("b")], None, 2, lambda: calls.append("before") or 7)
    assert n == 8 and [first for first, *_ in found] == [7, 7], "two seconds of 0.25"
    w = turns.WARM_UP
    assert calls == [("a", w), ("b", w), ("a", 1), *["before", ("a", 8), ("b", 8)] * 2]
    assert turns.measure_alternating([run("a")], 3, 1) == (3, [(None, {"seconds": 0.75})])


def test_ratios_are_of_pairs_and_their_median_is_reported():
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 2.0, 12.0]
    assert turns.speedup(ours, theirs) == {"ratio": 2.0, "ratio_spread": [1.0, 3.0]}
    assert turns.spread([3, 1, 2]) == [1, 3]


def test_an_error_in_nanogpt_is_reported_in_one_line(checkout, capsys, quick):
    source = (checkout / "train.py").read_text(encoding="utf-8")
    (checkout / "train.py").write_text(source.replace("np.fromfile(", "nothing("), encoding="utf-8")
    assert __main__.main(["loader", "--device=cpu", "--gigabytes=1e-3", f"--peer={checkout}", "--json"]) == 2
    error = capsys.readouterr().err
    assert error == "error: nanoGPT: NameError: name 'nothing' is not defined\n"


def test_a_process_that_dies_is_reported_in_one_line(tmp_path, config_of):
    turns.write_tokens(tmp_path, 65, 5000)
    with turns.BenchProcess("loader", config_of(tmp_path)) as process:
        process.process.kill()
        process.process.wait()
        with pytest.raises(ConfigError, match="napkin: its process ended with status -9"):
            process.turn(1)
