"""The ledger: predicted, measured and their ratio, for each figure of a run."""

from cli.units import duration, mib, si

# What a predicted time is based on -> what to suspect where the measured one is outside its band.
SUSPECTS = {
    "assumed": "the assumed MFU (--mfu) is not what this machine reaches",
    "given": "--mfu is not what this machine reaches",
    "estimated": "operations of other shapes were timed; python -m benchmarks ceilings CONFIG times these",
    "timed": "the machine is busier, or idler, than when its operations were timed",
}
# Each figure's unit, how far measured / predicted may be from 1, and what to suspect where it is further.
FIGURES = {
    "peak memory": ("bytes", 0.05, "an operation keeps or makes what estimate/layers.py does not list"),
    "FLOPs per step": ("FLOPs", 0.0, "the matmuls of estimate/layers.py are not the model's"),
    "step time": ("s", None, None),  # the prediction's own band
    "tokens/s": ("tokens/s", None, None),
    "MFU": ("fraction", None, None),
    "checkpoint": ("bytes", 0.05, "more is saved than weights and moments"),
    "resident": ("bytes", 0.25, "the allocator's heap has more gaps, or fewer, than in the runs this rests on"),
}
MIN_BYTES_FOR_RATIO = 2**16  # file headers, a matmul's scratch memory: smaller differences say nothing
SHOW = {
    "bytes": mib,
    "FLOPs": lambda n: si(n, "FLOP"),
    "s": duration,
    "tokens/s": lambda n: f"{n:,.0f}",
    "fraction": lambda x: f"{x:.1%}",
}


def compare(prediction: dict, measured: dict, compiled: bool = False, steady: bool = True) -> list[dict]:
    """Return a row per figure: predicted, measured, their ratio, and whether that lies in the figure's band.

    `measured` has peak_bytes, flops_per_step, step_s, checkpoint_bytes and resident_bytes; what was not measured is
    None and makes no row. For a compiled step an eager step's memory and time are predicted, as upper bounds: to need
    less is within. Before the steps are steady, `within` is None for times: the first steps are slower than the rest.
    """
    memory, flops, time, step_s = (*(prediction[key] for key in ("memory", "flops", "time")), measured["step_s"])
    attained = step_s and flops["per_step"] / step_s
    pairs = {
        "peak memory": (memory["peak"], measured["peak_bytes"]),
        "FLOPs per step": (flops["hardware_per_step"], measured["flops_per_step"]),
        "step time": (time["step_s"], step_s),
        "tokens/s": (time["tokens_per_s"], step_s and flops["tokens_per_step"] / step_s),
        "MFU": (time["mfu"], attained and time["peak_flops"] and attained / time["peak_flops"]),
        "checkpoint": (memory["checkpoint"], measured["checkpoint_bytes"]),
        "resident": (memory.get("resident"), measured.get("resident_bytes")),
    }
    rows = []
    for figure, (predicted, found) in pairs.items():
        if predicted is not None and found is not None:
            unit, band, suspect = FIGURES[figure]
            if band is None:
                band, suspect = time["band"], SUSPECTS[time["basis"]]
            ratio = found / predicted
            near = abs(ratio - 1) <= band or (unit == "bytes" and abs(found - predicted) < MIN_BYTES_FOR_RATIO)
            better = ratio > 1 if figure in ("tokens/s", "MFU") else ratio < 1
            within = near or (compiled and better and figure not in ("FLOPs per step", "checkpoint"))
            if not steady and figure in ("step time", "tokens/s", "MFU", "resident"):
                within = None
            rows.append({"figure": figure, "predicted": predicted, "measured": found, "unit": unit, "ratio": ratio,
                         "band": band, "within": within, "suspect": suspect})  # fmt: skip
    return rows


def table(rows: list[dict], when: str, note: str):
    """Yield the ledger, line by line."""
    yield f"predicted and measured {when}{f' ({note})' if note else ''}"
    yield f"  {'':<16} {'predicted':>12} {'measured':>12} {'ratio':>8}"
    for row in rows:
        predicted, found = (SHOW[row["unit"]](row[key]) for key in ("predicted", "measured"))
        outside = f"  outside 1 ± {row['band']:g}: {row['suspect']}"
        verdict = {True: "", None: "  so far", False: outside}[row["within"]]
        yield f"  {row['figure']:<16} {predicted:>12} {found:>12} {row['ratio']:>8.3f}{verdict}"
