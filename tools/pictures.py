"""What tools.report draws: the numbers of each picture, and how they are drawn with matplotlib."""

import itertools
import math
import statistics
import sys

from cli.units import mib, si
from estimate import roofline
from estimate.memory import Timeline
from estimate.step import training_step

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, RED, PINK, INK, GREY = "#E69F00", "#D55E00", "#CC79A7", "#222222", "#999999"
LAYERS = {"parameters": BLUE, "optimizer state": SKY, "batch": "#666666", "rotation tables": "#BBBBBB",
          "gradients": GREEN, "weight copies": YELLOW, "saved activations": ORANGE,
          "gradients of activations": PINK, "logits and loss": RED}  # fmt: skip
GROUPS = {"attention": BLUE, "mlp": ORANGE, "head": RED, "embedding": GREEN}
PHASES = {"forward": "o", "backward": "s"}


def note(text):
    print(text, file=sys.stderr)


# --- the numbers that are drawn


def memory_layers(step):
    """Return (Timeline, {category: bytes alive during each operation}) of a step; the sum is Timeline.live."""
    timeline, persistent, buffers = Timeline(step), {}, {}
    for buffer in step.persistent:
        category = timeline.category(buffer)
        persistent[category] = persistent.get(category, 0) + buffer.bytes * buffer.repeat
    for buffer in timeline.first:
        buffers.setdefault(timeline.category(buffer), []).append(buffer)
    names = [*LAYERS, *buffers, *persistent]  # a category that has no colour comes last
    layers = {c: timeline.bytes_over_time(buffers.get(c, ()), persistent.get(c, 0)) for c in dict.fromkeys(names)}
    return timeline, {category: layer for category, layer in layers.items() if any(layer)}


def execution_order(ops, peak=None, bandwidth=None):
    """Return (order, edges): the indices of the operations as they are executed, and when each starts and ends.

    Operation order[i] takes the part of the step from edges[i] to edges[i + 1]; the whole step is from 0 to 1. The
    operations of a micro-step are listed once and executed in every micro-step. The length of an operation is its share
    of the least seconds by the roofline. If peak (FLOP/s) or bandwidth (bytes/s) is unknown, all have the same length.
    """
    order = []
    for times, same in itertools.groupby(range(len(ops)), lambda i: ops[i].times):
        order += [*same] * times
    weights = [op.least_seconds(peak, bandwidth) if peak and bandwidth else 1.0 for op in ops]
    edges = [0.0, *itertools.accumulate(weights[i] for i in order)]
    return order, [edge / edges[-1] for edge in edges]


def smooth(values, span):
    """Return the centred moving average over about `span` values; fewer at the start and the end. NaN is ignored."""
    known = [value for value in values if not math.isnan(value)]
    sums, before = [0.0, *itertools.accumulate(known)], [0, *itertools.accumulate(not math.isnan(v) for v in values)]
    result = []
    for i in range(len(values)):
        reach = min(span // 2, i)
        low, high = before[i - reach], before[min(i + reach + 1, len(values))]
        result.append((sums[high] - sums[low]) / (high - low) if high > low else math.nan)
    return result


# --- the pictures: each function draws into the axes, or returns the reason why it cannot


def draw_memory(run, axes):
    """Draw the predicted bytes over a step as areas stacked by category, and what was measured as a line."""
    timeline, layers = memory_layers(training_step(run.config, run.spec, whole=True))
    ops, peak, measured, curve = timeline.step.ops, timeline.peak, run.measured.get("peak_bytes"), run.curve
    order, edges = execution_order(ops, run.spec.peak(run.config.dtype), run.spec.bandwidth)
    unit, name = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    stack = [0] * len(ops)
    for z, (category, layer) in enumerate(layers.items()):
        # Each area starts at 0, and earlier areas cover its lower part. So no gap is visible between two areas.
        stack = [below + n for below, n in zip(stack, layer, strict=True)]
        style = {"color": LAYERS.get(category, GREY), "linewidth": 0, "zorder": 1 - z / 100, "label": category}
        axes.fill_between(edges, [stack[i] / unit for i in (*order, order[-1])], step="post", **style)
    if curve:
        x, y = zip(*curve, strict=True)
        axes.plot(x, [n / unit for n in y], color=INK, linewidth=1, drawstyle="steps-post", label="measured")
    elif measured:
        axes.axhline(measured / unit, color=INK, linewidth=1, linestyle="--", label="measured peak")
    top = max([peak, measured or 0, *(y for _, y in curve)]) / unit

    at = order.index(timeline.live.index(peak))
    x = (edges[at] + edges[at + 1]) / 2
    text = f"predicted peak {mib(peak)}: {timeline.peak_op.phase}, {timeline.peak_op.name}"
    axes.annotate(text, (x, peak / unit), (min(max(x, 0.3), 0.7), 1.13 * top), ha="center", fontsize=8,
                  bbox={"color": "white", "pad": 1}, arrowprops={"arrowstyle": "-", "linewidth": 0.8})  # fmt: skip
    axes.plot([x], [peak / unit], "o", color=INK, markersize=4)

    n, end = run.config.gradient_accumulation_steps, 0
    # With more than 3 micro-steps there is no room to label each phase.
    merged = f"{n} micro-steps of forward and backward" if n > 3 else None
    phases = [merged if merged and ops[i].phase != "optimizer" else ops[i].phase for i in order]
    for phase, same in itertools.groupby(phases):
        start, end = end, end + len([*same])
        left, right = edges[start], edges[end]
        is_narrow = left > 0.88  # the last phase may be narrower than its label
        x, side = (1, "right") if is_narrow else ((left + right) / 2, "center")
        axes.text(x, 1.24 * top, phase, ha=side, va="center", fontsize=8, bbox={"color": "white", "pad": 1})
        axes.axvline(left, color=INK, linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, 1.3 * top), xlabel="fraction of the step", ylabel=f"bytes alive ({name})")
    if run.prediction["memory"]["peak"] != peak:
        earlier = mib(run.prediction["memory"]["peak"])
        note(f"memory.png shows the peak that this version predicts, {mib(peak)}; the run itself predicted {earlier}")


def draw_roofline(run, axes):
    """Draw the device's roofline; below it the step's matmuls by phase and group, and the whole step as measured."""
    spec, dtype, step_s = run.spec, run.config.dtype, run.measured.get("step_s")
    peak, bandwidth = spec.peak(dtype), spec.bandwidth
    if not (peak and bandwidth):
        return f"ledger.json does not give the device's peak in {dtype} and its bandwidth"
    ridge, rows = peak / bandwidth, roofline.table(training_step(run.config, spec).ops, peak, bandwidth)
    whole, rows = roofline.total(rows), [row for row in rows if row["flops"]]
    xs = [row["intensity"] for row in (*rows, whole)]
    ys = [row["flops"] / row["seconds"] for row in (*rows, whole)]
    low, high = min(*xs, ridge) / 3, max(*xs, ridge) * 3
    roof = [low, ridge, high], [low * bandwidth, peak, peak]
    axes.plot(*roof, color=INK, linewidth=1.5)
    axes.fill_between(*roof, color=GREY, alpha=0.12, linewidth=0)
    axes.axvline(ridge, color=GREY, linewidth=0.8, linestyle=":")
    for row, x, y in zip(rows, xs, ys, strict=False):
        style = PHASES[row["phase"]], GROUPS.get(row["group"], PINK)
        axes.scatter(x, y, 45, marker=style[0], color=style[1], zorder=3, label=f"{row['phase']} {row['group']}")
    star = {"s": 150, "marker": "*", "edgecolor": INK, "zorder": 4}
    axes.scatter(xs[-1], ys[-1], facecolor="none", label="whole step, upper bound", **star)
    if step_s:
        ys.append(whole["flops"] / step_s)
        axes.scatter(xs[-1], ys[-1], facecolor=INK, label=f"whole step, measured:\n{si(ys[-1], 'FLOP/s')}", **star)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(ys) / 4, peak * 3))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="speed (FLOP/s)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: si(y))
    ceiling = f"peak {si(peak, 'FLOP/s')} in {dtype}, bandwidth {si(bandwidth, 'B/s')} "
    axes.text(high, peak * 1.15, ceiling, ha="right", fontsize=8)
    axes.text(ridge, min(ys) / 3.5, f" ridge {ridge:.3g} FLOP/byte", fontsize=8)


def draw_loss(run, axes):
    """Draw the loss of each step, its moving average, and the evaluations."""
    steps, losses = run.series("loss")
    evaluated, val_losses = run.series("val_loss")
    if not any(map(math.isfinite, losses + val_losses)):
        return "metrics.jsonl has no loss yet"
    draw_curve(axes, steps, losses, "training", BLUE)
    if val_losses:
        label = f"validation, {val_losses[-1]:.4f} at step {evaluated[-1]:,}"
        axes.plot(evaluated, val_losses, "D", color=RED, markeredgecolor="white", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")


def draw_mfu(run, axes):
    """Draw the MFU of each step and the predicted MFU, with tokens/s on the right-hand axis."""
    (steps, mfus, speeds), predicted = run.series("mfu", "tokens_per_s"), run.prediction["time"].get("mfu")
    known = [(mfu, tokens_per_s) for mfu, tokens_per_s in zip(mfus, speeds, strict=True) if mfu > 0]  # not NaN
    if not known:
        unknown = run.records and not run.prediction["time"].get("peak_flops")
        return "the device's peak is not known" if unknown else "metrics.jsonl has no MFU yet"
    draw_curve(axes, steps, [100 * x for x in mfus], f"MFU, median {statistics.median(m for m, _ in known):.1%}", BLUE)
    if predicted:
        axes.axhline(100 * predicted, color=RED, linewidth=1.2, linestyle="--", label=f"predicted {predicted:.1%}")
    top = 115 * max(predicted or 0, *(m for m, _ in known))
    axes.set(xlabel="step", ylabel="MFU (% of the peak)", ylim=(0, top))
    rates = [tokens_per_s / (100 * m) for m, tokens_per_s in known]
    if not max(rates) <= 1.001 * min(rates):
        return note("mfu.png has no axis of tokens/s, because the MFU of the steps refers to different peaks")
    rate = rates[-1]  # tokens/s per percent: one curve serves both axes
    other = axes.secondary_yaxis("right", functions=(lambda y: y * rate, lambda y: y / rate))
    other.set_ylabel("tokens/s")
    other.yaxis.set_major_formatter("{x:,.0f}")


def draw_curve(axes, steps, values, label, colour):
    """Draw a curve as a thin line, and its moving average as a thicker one."""
    span, marker = max(1, len(values) // 50), "." if len(values) < 100 else ""
    axes.plot(steps, values, color=colour, alpha=1 if marker else 0.35, linewidth=0.7, marker=marker, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if span > 1:
        axes.plot(steps, smooth(values, span), color=colour, linewidth=1.8, label=f"mean over about {span} steps")


RIGHT, BELOW = {"loc": "outside right center"}, {"loc": "outside lower center", "ncols": 4}
PICTURES = {  # file -> (function that draws it, title, place of the legend)
    "memory.png": (
        draw_memory,
        "Memory over a step: predicted (areas) and measured (line)",
        RIGHT | {"reverse": True},
    ),
    "roofline.png": (draw_roofline, "Roofline: matmuls at their upper bounds, and the step as measured", RIGHT),
    "loss.png": (draw_loss, "Loss", BELOW),
    "mfu.png": (draw_mfu, "Model FLOPs utilisation and speed", BELOW),
}
