"""Draw a run's folder, finished or still running: python report.py OUT_DIR writes memory.png and three more into it.

Each picture holds a prediction against what was measured: bytes over a step, its operations under the device's
roofline, MFU; and the loss. One that the run has no data for is left out, and a line says why.
"""

import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import roofline
from config import Config, ConfigError, check, command, parse, read_file, require
from hardware import Device
from prediction import Timeline, predict
from schedule import schedule
from units import mib, si

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:  # an option: nothing else in the project draws with it
    Figure = None

# Okabe and Ito's colours, which colour-blind eyes tell apart.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, RED, PINK, INK, GREY = "#E69F00", "#D55E00", "#CC79A7", "#222222", "#999999"
LAYERS = {"parameters": BLUE, "optimizer state": SKY, "batch": "#666666", "rotation tables": "#BBBBBB",
          "gradients": GREEN, "weight copies": YELLOW, "saved activations": ORANGE,
          "gradients of activations": PINK, "logits and loss": RED}  # fmt: skip
GROUPS = {"attention": BLUE, "mlp": ORANGE, "head": RED, "embedding": GREEN}
PHASES = {"forward": "o", "backward": "s"}


@dataclass(frozen=True)
class Options:
    """Draw a run as PNG files in its folder: memory, roofline, loss and mfu."""


@dataclass
class Run:
    """What a folder says of its run. measured, curve: from ledger.json, empty so far; records: of metrics.jsonl."""

    folder: Path
    config: Config
    device: Device
    prediction: dict
    measured: dict
    curve: list[tuple[float, float]]  # (fraction of the step, bytes)
    records: list[dict]

    def series(self, name):
        """Return (steps, values) of the records that have a figure; NaN where it is null."""
        records = [record for record in self.records if name in record]
        return [record["step"] for record in records], [number(record[name]) for record in records]


@command
def main(argv):
    words, _ = parse(argv, (Options,), "OUT_DIR")
    require(len(words) == 1, f"one run's folder is wanted, as in python report.py out; got {' '.join(words) or 'none'}")
    require(Figure, "report.py draws with matplotlib, which is not installed: pip install matplotlib")
    run = read_run(Path(words[0]))
    for name, (draw, title, legend) in PICTURES.items():
        path = run.folder / name
        canvas = FigureCanvasAgg(Figure(figsize=(8, 4.5), dpi=120, layout="constrained"))
        axes = canvas.figure.add_subplot()
        if missing := draw(run, axes):
            note(f"{name} left out: {missing}")
            continue
        canvas.figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
        axes.set_title(summary(run), loc="left", fontsize=8, color="#555555")
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        canvas.figure.legend(handles, labels, fontsize=8, frameon=False, **legend)
        try:
            canvas.print_png(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        print(path, flush=True)
    return 0


def note(text):
    print(text, file=sys.stderr)


def summary(run):
    """Return the run in one line."""
    c = run.config
    steps = f" × {c.gradient_accumulation_steps}" if c.gradient_accumulation_steps > 1 else ""
    where = c.device if run.device.name == "unknown" else run.device.name
    size = f"{c.n_layer} layers, width {c.n_embd}, context {c.block_size:,}, batch {c.batch_size}{steps}"
    return f"{c.model}, {size}, {c.dtype} on {where}"


# --- reading


def read_run(folder):
    """Return the Run of a folder; of its files only config.py must be there, since a run writes the others later."""
    path = folder / "config.py"
    require(path.exists(), f"{path}: no such file; a run makes it: python train.py CONFIG.py --out_dir={folder}")
    config = Config(**read_file(path))
    check(config)
    resolved = config.vocab_size and config.n_kv_head and config.head_dim and config.d_ff and config.dtype != "auto"
    require(resolved, f"{path}: has settings that a run would have resolved; name the out_dir of a run")
    path = folder / "ledger.json"
    try:
        ledger = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        device = Device("unknown", "cpu" if config.device == "auto" else config.device.split(":")[0])
        if entry := ledger.get("device"):
            device = Device(**entry | {"dtypes": tuple(entry["dtypes"])})
        prediction, measured = ledger.get("prediction") or predict(config, device), ledger.get("measured") or {}
        curve = [(float(x), float(y)) for x, y in measured.get("timeline") or ()]
        prediction["memory"]["peak"] + len(prediction["time"])  # what is drawn of it is there
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{path}: damaged ({type(error).__name__}: {error}); move it away to draw the run without it"
        raise ConfigError(problem) from None
    return Run(folder, config, device, prediction, measured, curve, read_metrics(folder / "metrics.jsonl"))


def read_metrics(path):
    """Return the records of metrics.jsonl; none where it is absent. A run may be writing its last line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); move it away to draw the run without it") from None
    records = []
    for i, line in enumerate(lines, 1):
        if line.endswith("\n"):
            try:
                records.append(json.loads(line))
                require(isinstance(records[-1]["step"], int), f"{path}:{i}: its step is no number; take the line out")
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError(f"{path}:{i}: damaged; take the line out to draw the others") from None
    return records


def number(x):
    """Return a record's figure, NaN for null and whatever else is not finite."""
    return x if isinstance(x, (int, float)) and math.isfinite(x) else math.nan


# --- what is drawn, as numbers


def memory_layers(s):
    """Return (Timeline, {category: bytes alive during each operation}) of a schedule; the categories add up to live."""
    timeline, standing, buffers = Timeline(s), {}, {}
    for buffer in s.standing:
        category = timeline.category(buffer)
        standing[category] = standing.get(category, 0) + buffer.bytes * buffer.repeat
    for buffer in timeline.first:
        buffers.setdefault(timeline.category(buffer), []).append(buffer)
    names = [*LAYERS, *buffers, *standing]  # a category that this file does not know comes last
    layers = {c: timeline.bytes_over_time(buffers.get(c, ()), standing.get(c, 0)) for c in dict.fromkeys(names)}
    return timeline, {category: layer for category, layer in layers.items() if any(layer)}


def as_run(ops, peak=None, bandwidth=None):
    """Return (indices of the operations in the order they run, edges): edges[i] to edges[i + 1] of the step is the ith.

    Micro-steps recorded once run as often as they do. An operation takes its share of the least seconds of all; where
    peak (FLOP/s) or bandwidth (bytes/s) is not known, all take the same.
    """
    order = []
    for times, same in itertools.groupby(range(len(ops)), lambda i: ops[i].times):
        order += [*same] * times
    weights = [op.least_seconds(peak, bandwidth) if peak and bandwidth else 1.0 for op in ops]
    edges = [0.0, *itertools.accumulate(weights[i] for i in order)]
    return order, [edge / edges[-1] for edge in edges]


def smooth(values, span):
    """Return the mean around each value, over about span of them; NaN is left out, and at the start there are fewer."""
    known = [value for value in values if not math.isnan(value)]
    sums, before = [0.0, *itertools.accumulate(known)], [0, *itertools.accumulate(not math.isnan(v) for v in values)]
    result = []
    for i in range(len(values)):
        reach = min(span // 2, i)
        low, high = before[i - reach], before[min(i + reach + 1, len(values))]
        result.append((sums[high] - sums[low]) / (high - low) if high > low else math.nan)
    return result


# --- the pictures: each fills the axes, or returns why it cannot


def draw_memory(run, axes):
    """Stack the predicted bytes over a step, by category; over them, what was measured."""
    timeline, layers = memory_layers(schedule(run.config, run.device, whole=True))
    ops, peak, measured, curve = timeline.schedule.ops, timeline.peak, run.measured.get("peak_bytes"), run.curve
    order, edges = as_run(ops, run.device.peak(run.config.dtype), run.device.bandwidth)
    unit, name = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    stack = [0] * len(ops)
    for z, (category, layer) in enumerate(layers.items()):  # each from 0 up, behind those before it: no seams
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
    alike = f"{n} micro-steps of forward and backward" if n > 3 else None  # more phases than there is room to name
    phases = [alike if alike and ops[i].phase != "optimizer" else ops[i].phase for i in order]
    for phase, same in itertools.groupby(phases):
        start, end = end, end + len([*same])
        left, right = edges[start], edges[end]
        x, side = (1, "right") if left > 0.88 else ((left + right) / 2, "center")  # the last may be narrow
        axes.text(x, 1.24 * top, phase, ha=side, va="center", fontsize=8, bbox={"color": "white", "pad": 1})
        axes.axvline(left, color=INK, linewidth=0.6, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, 1.3 * top), xlabel="fraction of the step", ylabel=f"bytes alive ({name})")
    if run.prediction["memory"]["peak"] != peak:
        said = mib(run.prediction["memory"]["peak"])
        note(f"memory.png has the peak that this version predicts, {mib(peak)}; the run's own predicted {said}")


def draw_roofline(run, axes):
    """Put the step's matmuls, by phase and group, under the device's roof, and the step where it was measured."""
    device, dtype, step_s = run.device, run.config.dtype, run.measured.get("step_s")
    peak, bandwidth = device.peak(dtype), device.bandwidth
    if not (peak and bandwidth):
        return f"ledger.json names no device with its peak in {dtype} and its bandwidth"
    ridge, rows = peak / bandwidth, roofline.table(schedule(run.config, device).ops, peak, bandwidth)
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
    axes.scatter(xs[-1], ys[-1], facecolor="none", label="the whole step, at most", **star)
    if step_s:
        ys.append(whole["flops"] / step_s)
        axes.scatter(xs[-1], ys[-1], facecolor=INK, label=f"the whole step, measured:\n{si(ys[-1], 'FLOP/s')}", **star)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(ys) / 4, peak * 3))
    axes.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="speed (FLOP/s)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: si(y))
    ceiling = f"peak {si(peak, 'FLOP/s')} in {dtype}, bandwidth {si(bandwidth, 'B/s')} "
    axes.text(high, peak * 1.15, ceiling, ha="right", fontsize=8)
    axes.text(ridge, min(ys) / 3.5, f" ridge {ridge:.3g} FLOP/byte", fontsize=8)


def draw_loss(run, axes):
    """Draw the loss of each step, its mean over a while, and the evaluations."""
    steps, losses = run.series("loss")
    evaluated, val_losses = run.series("val_loss")
    if not any(map(math.isfinite, losses + val_losses)):
        return "metrics.jsonl has no loss yet"
    noisy(axes, steps, losses, "training", BLUE)
    if val_losses:
        label = f"validation, {val_losses[-1]:.4f} at step {evaluated[-1]:,}"
        axes.plot(evaluated, val_losses, "D", color=RED, markeredgecolor="white", label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")


def draw_mfu(run, axes):
    """Draw MFU by step, with tokens/s on the other side, and what was predicted."""
    (steps, mfus), predicted = run.series("mfu"), run.prediction["time"].get("mfu")
    known = [(r["mfu"], number(r.get("tokens_per_s"))) for r in run.records if number(r.get("mfu")) > 0]
    if not known:
        unknown = run.records and not run.prediction["time"].get("peak_flops")
        return "the device's peak is not known" if unknown else "metrics.jsonl has no MFU yet"
    noisy(axes, steps, [100 * x for x in mfus], f"MFU, median {statistics.median(m for m, _ in known):.1%}", BLUE)
    if predicted:
        axes.axhline(100 * predicted, color=RED, linewidth=1.2, linestyle="--", label=f"predicted {predicted:.1%}")
    top = 115 * max(predicted or 0, *(m for m, _ in known))
    axes.set(xlabel="step", ylabel="MFU (% of the peak)", ylim=(0, top))
    rates = [tokens_per_s / (100 * m) for m, tokens_per_s in known]
    if not max(rates) <= 1.001 * min(rates):
        return note("mfu.png has no tokens/s: not all steps were held against the same peak")
    rate = rates[-1]  # both are one curve, in two units
    other = axes.secondary_yaxis("right", functions=(lambda y: y * rate, lambda y: y / rate))
    other.set_ylabel("tokens/s")
    other.yaxis.set_major_formatter("{x:,.0f}")


def noisy(axes, steps, values, label, colour):
    """Draw a curve as it is, thinly, and smoothed."""
    span, marker = max(1, len(values) // 50), "." if len(values) < 100 else ""
    axes.plot(steps, values, color=colour, alpha=1 if marker else 0.35, linewidth=0.7, marker=marker, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if span > 1:
        axes.plot(steps, smooth(values, span), color=colour, linewidth=1.8, label=f"mean over about {span} steps")


BESIDE, BELOW = {"loc": "outside right center"}, {"loc": "outside lower center", "ncols": 4}
PICTURES = {  # file: what draws it, its title, where its legend stands
    "memory.png": (
        draw_memory,
        "Memory over a step: predicted (areas) and measured (line)",
        BESIDE | {"reverse": True},
    ),
    "roofline.png": (draw_roofline, "Under the roofline: matmuls at most, and the step as measured", BESIDE),
    "loss.png": (draw_loss, "Loss", BELOW),
    "mfu.png": (draw_mfu, "Model FLOPs utilisation and speed", BELOW),
}


if __name__ == "__main__":
    sys.exit(main())
