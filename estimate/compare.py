"""Comparisons: two configs on one device, and one config on every accelerator of the table."""

import math
from dataclasses import replace

from cli.errors import require
from cli.units import duration, mib, si
from config import resolve
from estimate.fit import PeakByBatch
from estimate.flops import step_flops
from estimate.predict import predict
from estimate.report import band
from estimate.step import training_step
from estimate.step_time import ASSUMED_BAND, ASSUMED_MFU
from hardware.accelerators import ACCELERATORS


def compare_cards(config, mfu=ASSUMED_MFU):
    """Return a row for every accelerator of the table: whether the config fits, the largest batch_size, and the times.

    The cards on which it fits come first, the fastest of them at the top. A card without matmuls in the config's dtype
    gets the dtype that "auto" means there. The step's operations depend only on the kind of device and on the dtype, so
    they are listed once for each such pair.
    """
    require(0 < mfu <= 1, f"mfu={mfu} must lie in (0, 1]")
    rows, by_kind_and_dtype = [], {}
    for name, spec in ACCELERATORS.items():
        lacking = config.dtype != "auto" and not spec.has_matmul(config.dtype)
        c = resolve(replace(config, dtype="auto") if lacking else config, spec)
        pair = (spec.kind, c.dtype)
        if pair not in by_kind_and_dtype:
            by_kind_and_dtype[pair] = step_flops(training_step(c, spec))["per_step"], PeakByBatch(c, spec)
        flops, peaks = by_kind_and_dtype[pair]
        memory, peak = spec.memory_bytes, spec.peak(c.dtype)
        step_s = flops / (peak * mfu) if peak else None
        fits = peaks.at(c.batch_size) <= memory if memory else None
        rows.append({"name": name, "dtype": c.dtype, "memory_bytes": memory, "fits": fits,
                     "largest_batch": peaks.largest(memory) if memory else None,
                     "step_s": step_s, "days": step_s * c.max_iters / 86400 if peak else None})  # fmt: skip
    order = {True: 0, None: 1, False: 2}
    return sorted(rows, key=lambda r: (order[r["fits"]], r["largest_batch"] == 0, r["step_s"] or math.inf))


def compare_cards_lines(rows, mfu):
    def shown(value, show):
        return "n/a" if value is None else show(value)

    yield f"{'card':<16}{'dtype':<10}{'memory':>11}{'fits':>6}{'largest batch_size':>20}{'a step':>12}{'the run':>17}"
    for r in rows:
        memory, largest = shown(r["memory_bytes"], mib), shown(r["largest_batch"], str)
        fits = shown(r["fits"], lambda fits: "yes" if fits else "no")
        step, run = shown(r["step_s"], duration), shown(r["days"], lambda days: duration(days * 86400))
        yield f"{r['name']:<16}{r['dtype']:<10}{memory:>11}{fits:>6}{largest:>20}{step:>12}{run:>17}"
    assumed = f"times assume an MFU of {mfu:.0%}, give or take {ASSUMED_BAND:.0%}"
    yield f"one card each; {assumed}; this trainer does not run on TPUs"


COMPARED = {  # name -> its place in a prediction, and how it is shown
    "parameters": ("model", "params", si),
    "FLOPs a token": ("flops", "per_token", si),
    "FLOPs a step": ("flops", "per_step", si),
    **{f"{key.replace('_', ' ')}, bytes": ("memory", key, mib)
       for key in ("params", "gradients", "optimizer", "activations", "weight_copies", "loss", "batch", "peak")},
    "a step": ("time", "step_s", duration),
    "the run": ("time", "total_s", duration),
}  # fmt: skip


def compare(config_a, config_b, spec, memory_bytes=None, mfu=ASSUMED_MFU):
    """Return the settings in which two resolved configs differ, and {name: (first, second, difference)} of figures."""
    a, b = (predict(config, spec, memory_bytes, mfu) for config in (config_a, config_b))
    pairs = {name: (getattr(config_a, name), getattr(config_b, name)) for name in vars(config_a)}
    figures = {name: (a[group][key], b[group][key]) for name, (group, key, _) in COMPARED.items()}
    return {
        "settings": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "figures": {name: (x, y, None if x is None else y - x) for name, (x, y) in figures.items()},
        "bands": [p["time"]["step_s"] and band(p["time"]) for p in (a, b)],
    }


def compare_lines(result):
    for name, (a, b) in result["settings"].items():
        yield f"{name}: {a!r} -> {b!r}"
    yield f"{'':<22}{'first':>14}{'second':>14}{'difference':>14}"
    for name, (a, b, difference) in result["figures"].items():
        if difference is None:
            yield f"{name:<22}{'n/a':>14}{'n/a':>14}"
            continue
        show, sign = COMPARED[name][-1], "+" if difference > 0 else "-"
        change = f"{difference / a:>+9.1%}" if a and difference else ""
        yield f"{name:<22}{show(a):>14}{show(b):>14}{sign + show(abs(difference)) if difference else 0:>14}{change}"
    for name, bounds in zip(("first", "second"), result["bands"], strict=True):
        if bounds:
            yield f"a step of the {name} config: {bounds}"
