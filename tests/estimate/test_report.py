"""The report as it is printed before a run, and the bars of memory over a step."""

import itertools
import re
import time

import pytest

import accounting
from cli.config_file import read_settings
from cli.units import duration, si
from config import ROOT, Config, resolve
from estimate import roofline
from estimate.formulas import explain
from estimate.predict import predict
from estimate.report import BASIS, band, report, timeline
from estimate.step import training_step
from hardware.accelerators import accelerator
from tests.estimate.helpers import CPU, SMALL, UNKNOWN, config_of


def test_the_report_names_the_peak_and_its_reason(capsys):
    assert accounting.main([str(ROOT / "configs" / "gpt2.py"), "--gpu=a100-40gb"]) == 0
    printed = capsys.readouterr().out
    assert "124,373,760" in printed and "as PaLM counts it" in printed
    assert "in forward, chunk's logits into their gradient" in printed


def test_the_first_three_lines_say_whether_it_fits_how_long_it_takes_and_at_what_mfu():
    config, a100 = config_of(), accelerator("a100-40gb")
    fits, time, mfu, *_ = report(config, a100, predict(config, a100))
    assert fits.startswith("fits        yes: ") and " at the peak, of " in fits
    assert re.match(
        r"time        \S+ \S+ in all, \S+ s a step \(\S+ s to \S+ s: the MFU is assumed\), [\d,]+ tokens/s", time
    )
    assert mfu.startswith("MFU         40%, assumed (--mfu sets it), of ")
    fits, *_ = report(config, a100, predict(config, a100, 2**20))
    assert fits.startswith("fits        no: ")
    fits, *_ = report(config, UNKNOWN, predict(config, UNKNOWN))
    assert fits.startswith("fits        unknown: ") and fits.endswith("(--memory gives it)")


def test_what_fits_only_just_is_said_to_fit_barely():
    a100 = accelerator("a100-40gb")
    memory = predict(config_of(), a100)["memory"]
    extra = sum(most for name, (_, most) in memory["card"].items() if name != "CUDA context")
    for available, word in ((memory["peak"] + extra, "yes"), (memory["peak"] + extra - 1, "barely"), (1, "no")):
        fits, *_ = report(config_of(), a100, predict(config_of(), a100, available))
        assert fits.startswith(f"fits        {word}: ")


def test_6nd_is_printed_of_a_step_and_of_the_run_with_the_exact_count_beside_it():
    """By hand: 6 N D, with N all parameters and D the tokens; and the convention of causal attention."""
    config = config_of(max_iters=50)
    p = predict(config, CPU)
    n, d = p["model"]["params"], config.tokens_per_step
    assert p["flops"]["six_nd_per_step"] == 6 * n * d
    lines = "\n".join(report(config, CPU, p))
    assert f"N = {n:,}, " in lines and f"D = {si(50 * d)} tokens" in lines
    assert f"6ND:    {si(6 * n * d, 'FLOP')} a step, {si(300 * n * d, 'FLOP')} in all" in lines
    for name in ("per_step", "causal_per_step"):
        total = p["flops"][name]
        assert f"{si(total, 'FLOP')} a step, {si(50 * total, 'FLOP')} in all ({total / (6 * n * d):.2f} x 6ND" in lines


@pytest.mark.parametrize("mfu, basis", [(None, "assumed"), (0.3, "given")])
def test_every_time_has_a_band_and_its_reason(mfu, basis):
    a100 = accelerator("a100-40gb")
    time = predict(config_of(), a100, mfu=mfu)["time"]
    assert time["basis"] == basis and f"{duration(time['step_s'] / 2)} to " in band(time) and BASIS[basis] in band(time)
    page = "\n".join(explain(config_of(), a100, mfu))
    assert band(time) in page and "times are lower bounds" in "\n".join(roofline.lines(config_of(), a100))


def test_an_unknown_peak_gives_no_time_rather_than_a_guess(capsys):
    prediction = predict(config_of(), UNKNOWN)
    assert prediction["time"]["step_s"] is None
    lines = "\n".join(report(config_of(), UNKNOWN, prediction))
    assert "unknown without the device's peak" in lines


def test_a_preflight_is_printed_at_once():
    """In seconds of the processor: what stands before a run's first step, measuring left out."""
    config = resolve(Config(**read_settings(ROOT / "configs" / "gpt2_xl.py", Config)), CPU)
    start = time.process_time()
    assert len(list(report(config, CPU, predict(config, CPU)))) > 15
    assert time.process_time() - start < 0.1


def test_what_a_card_holds_beside_the_tensors_is_printed_apart():
    a100 = accelerator("a100-40gb")
    lines = "\n".join(report(config_of(), a100, predict(config_of(), a100)))
    assert "(estimated)" in lines and "fragmentation" in lines and "pinned host memory" in lines
    assert "(estimated)" not in "\n".join(report(config_of(), CPU, predict(config_of(), CPU)))


def test_the_timeline_shows_each_layer_and_the_peak(capsys):
    argv = ["--gpu=a100-40gb", "--memory", *(f"--{name}={value}" for name, value in SMALL.items())]
    assert accounting.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("timeline")) + 1 :]
    names = [row[2:30].strip() for row in rows]
    assert [n for n in names if n.startswith("forward")][:5] == [
        "forward embedding", "forward layer 0", "forward layer 1", "forward norm", "forward head"
    ]  # fmt: skip
    assert sum("peak:" in row for row in rows) == 1 and max(row.count("#") for row in rows) == 40
    assert names[-1] == "optimizer" and all(a != b for a, b in itertools.pairwise(names))


def test_a_deep_models_timeline_has_one_row_for_layers_that_are_alike():
    rows = list(timeline(training_step(config_of(n_layer=60), CPU)))
    assert len(rows) < 40 and sum("layers 2 to 57" in row for row in rows) >= 2
