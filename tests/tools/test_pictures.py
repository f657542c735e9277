"""The pictures of a run: the numbers that are drawn are those of the step, and what is in the axes of each picture."""

import itertools
import math

import pytest
from matplotlib.figure import Figure

from estimate.memory import Timeline
from estimate.predict import predict
from estimate.step import training_step
from tests.tools.small_run import CPU, config_of
from tools import pictures, report

SHAPES = {
    "gpt2": {"bias": True},
    "llama": {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    "dropout": {"dropout": 0.1, "attn_dropout": 0.1},
    "mlp": {"model": "mlp"},
    "deep": {"n_layer": 9},
}


def axes_of(draw, folder):
    """Return the axes that a picture was drawn into, to look at the numbers in it."""
    axes = Figure().add_subplot()
    assert draw(report.read_run(folder), axes) is None
    return axes


# --- the numbers


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_layers_add_up_to_the_bytes_alive(shape, accumulation, whole):
    s = training_step(config_of(gradient_accumulation_steps=accumulation, **SHAPES[shape]), CPU, whole=whole)
    timeline, layers = pictures.memory_layers(s)
    sums = [sum(column) for column in zip(*layers.values(), strict=True)]
    assert sums == timeline.live == Timeline(s).live and max(sums) == timeline.peak
    assert timeline.peak == predict(s.config, CPU)["memory"]["peak"]
    at_peak = {category: layer[sums.index(timeline.peak)] for category, layer in layers.items()}
    assert {c: n for c, n in at_peak.items() if n} == predict(s.config, CPU)["memory"]["at_peak"]
    assert set(layers) <= set(pictures.LAYERS)  # each has a colour


@pytest.mark.parametrize("peak, bandwidth", [(1e11, 2e10), (None, 2e10), (1e11, None)])
def test_operations_run_in_order_and_fill_the_step(peak, bandwidth):
    ops = training_step(config_of(gradient_accumulation_steps=4), CPU, whole=True).ops
    order, edges = pictures.execution_order(ops, peak, bandwidth)
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
    assert pictures.smooth(line, 10)[:95] == line[:95]
    assert pictures.smooth([math.nan, 2.0, math.nan, 4.0, 4.0], 2)[1:] == [2.0, 3.0, 4.0, 4.0]
    assert math.isnan(pictures.smooth([math.nan, 2.0], 2)[0]) and pictures.smooth([], 2) == []


# --- the axes


def test_the_top_of_the_stack_is_what_is_alive(run_folder):
    folder = run_folder(settings={"n_layer": 3})
    axes = axes_of(pictures.draw_memory, folder)
    top = max(collection.get_paths()[0].vertices[:, 1].max() for collection in axes.collections)
    assert math.isclose(top * 2**20, predict(config_of(n_layer=3), CPU)["memory"]["peak"])
    texts = {text.get_text() for text in axes.texts}
    assert {"forward", "backward", "optimizer"} <= texts and any("predicted peak" in text for text in texts)


def test_the_measured_curve_is_drawn_where_there_is_one_and_else_its_peak(run_folder):
    curve = [[0.0, 2**20], [0.5, 3 * 2**20], [1.0, 2**20]]
    axes = axes_of(pictures.draw_memory, run_folder(measured={"timeline": curve}))
    (line,) = (line for line in axes.lines if line.get_label() == "measured")
    assert line.get_xydata().tolist() == [[0, 1], [0.5, 3], [1, 1]]
    axes = axes_of(pictures.draw_memory, run_folder(measured={"peak_bytes": 5 * 2**20}))
    (line,) = (line for line in axes.lines if line.get_label() == "measured peak")
    assert list(line.get_ydata()) == [5, 5]


def test_the_step_stands_at_what_was_measured(run_folder):
    axes = axes_of(pictures.draw_roofline, run_folder())
    points = {c.get_label().split(":")[0]: c.get_offsets()[0].tolist() for c in axes.collections if c.get_label()}
    flops = predict(config_of(), CPU)["flops"]["per_step"]
    assert points["whole step, measured"][1] == flops / 0.01
    intensity, _ = points["whole step, upper bound"]
    assert points["whole step, measured"][0] == intensity
    assert {"forward attention", "backward mlp", "forward head"} <= set(points)
    for name, (x, y) in points.items():
        assert name.endswith("measured") or y <= min(1e11, 2e10 * x) * (1 + 1e-9)


def test_what_is_not_finite_is_left_out_of_the_curves(run_folder):
    axes = axes_of(pictures.draw_loss, run_folder())
    losses, smoothed, evaluations = (line.get_ydata() for line in axes.lines)
    assert len(losses) == 121 and math.isnan(losses[-1]) and not any(map(math.isnan, smoothed))
    assert evaluations[0] == 4.0 and math.isnan(evaluations[1])
