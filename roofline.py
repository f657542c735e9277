"""Where the time goes: each operation's FLOPs and bytes, their ratio, and which of the two bounds it.

An operation takes at least flops / peak and at least bytes / bandwidth, so at least the larger of the two. Which one it
is, its arithmetic intensity says, in FLOPs per byte, against the device's ridge point, peak / bandwidth (Williams et
al. 2009). Operations that are no matmul count no FLOPs here: they are bound by memory on any device.
"""

from collections import defaultdict

from config import require
from schedule import generation, schedule
from units import mib, si

LONGEST = 16  # operations that are printed; --json has all
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def table(ops, peak, bandwidth, by=("phase", "group")):
    """Return a row per phase and group, or other fields, of operations: FLOPs, bytes, intensity, bound, least seconds.

    All are of a step: an operation counts as often as it runs.
    """
    rows = defaultdict(lambda: {"flops": 0, "bytes": 0, "seconds": 0.0, "compute_seconds": 0.0})
    for op in ops:
        row, least = rows[tuple(getattr(op, name) for name in by)], op.least_seconds(peak, bandwidth)
        row["flops"] += op.flops * op.times
        row["bytes"] += op.bytes * op.times
        row["seconds"] += least * op.times
        if op.flops / peak >= op.bytes / bandwidth:
            row["compute_seconds"] += least * op.times
    return [dict(zip(by, key, strict=True)) | summary(row) for key, row in rows.items()]


def summary(row):
    """Return a row with its intensity and its bound: what bounds most of its time."""
    bound = "compute" if row["compute_seconds"] > row["seconds"] / 2 else "memory"
    return {**row, "intensity": row["flops"] / row["bytes"] if row["bytes"] else 0.0, "bound": bound}


def total(rows):
    return summary({key: sum(row[key] for row in rows) for key in ("flops", "bytes", "seconds", "compute_seconds")})


def inference(config, device, new, past, batch_size):
    """Return the totals of one forward of generation, and those of its weights' matmuls alone."""
    peak, bandwidth = device.peak(config.dtype), device.bandwidth
    ops = generation(config, device, batch_size, new, past).ops
    weights = [op for op in ops if op.matmuls and not op.is_attention]
    return total(table(ops, peak, bandwidth)), total(table(weights, peak, bandwidth))


def crossing(config, device, past):
    """Return the least batch size from which decoding's weight matmuls are bound by compute; None where none is.

    A weight of k x n elements is read once for all sequences: 2 B k n FLOPs over 2 (k n + B k + B n) bytes in 16 bits,
    an intensity of about B while B is small beside k and n; so the crossing lies at the ridge for wide layers, and
    beyond it for narrow ones. The cache is not shared: each sequence reads its own, whatever the batch.
    """
    low, high = 0, 1
    ridge = device.peak(config.dtype) / device.bandwidth

    def bound_by_compute(batch_size):
        return inference(config, device, 1, past, batch_size)[1]["intensity"] >= ridge

    while not bound_by_compute(high):
        if high >= 2**20:
            return None
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_by_compute(middle) else (middle, high)
    return high


def roofline(config, device):
    """Return everything above for a config and a device whose peak and bandwidth are known."""
    peak, bandwidth = device.peak(config.dtype), device.bandwidth
    require(
        peak, f"the peak of {device.name} in {config.dtype} is not known: name a card with --gpu, or train here once"
    )
    require(bandwidth, f"the memory bandwidth of {device.name} is not known; name a card with --gpu")
    ops = schedule(config, device).ops
    rows = table(ops, peak, bandwidth)
    result = {"ridge": peak / bandwidth, "step": rows, "total": total(rows)}
    result["operations"] = table(ops, peak, bandwidth, ("phase", "group", "label"))
    if device.link:  # beside the step: the next batch is copied while this one computes
        n_bytes = 2 * 8 * config.batch_size * config.block_size * config.gradient_accumulation_steps
        result["batch_copy"] = {"bytes": n_bytes, "seconds": n_bytes / device.link, "bound": "link"}
    if config.model == "transformer":
        past = config.block_size - 1
        prefill = inference(config, device, config.block_size, 0, 1)[0]
        decode = [{"batch_size": b, **inference(config, device, 1, past, b)[0]} for b in BATCHES]
        result |= {"prefill": prefill, "decode": decode, "crossing": crossing(config, device, past)}
    return result


def lines(config, device):
    """Yield the roofline as text."""
    r = roofline(config, device)
    yield (
        f"roofline    {device.name}: {si(device.peak(config.dtype), 'FLOP/s')} in {config.dtype} over "
        f"{device.bandwidth / 1e9:,.0f} GB/s; ridge at {r['ridge']:.0f} FLOP/byte"
    )
    yield f"  {'a training step':<30}{'FLOPs':>12}{'bytes':>14}{'FLOP/byte':>11}  {'bound':<8}{'at least':>11}"
    for row in [*r["step"], {"phase": "in all", "group": "", **r["total"]}]:
        name = f"{row['phase']} {row['group']}".strip() if row["phase"] != row["group"] else row["phase"]
        yield figures(name, row)
    if copy := r.get("batch_copy"):
        what = f"{mib(copy['bytes'])} from the host over {device.link / 1e9:,.1f} GB/s"
        yield f"  beside it, the next batch's copy: {what}, {copy['seconds'] * 1e3:.3f} ms"
    operations = sorted(r["operations"], key=lambda row: -row["seconds"])
    yield f"  of {len(operations)} operations, all blocks together, those that take the longest"
    for row in operations[:LONGEST]:
        yield figures(row["label"], row)
    if "decode" in r:
        yield f"  generation, context {config.block_size}"
        yield figures("prefill, batch 1", r["prefill"])
        for row in r["decode"]:
            yield figures(f"decode, batch {row['batch_size']}", row)
        at = r["crossing"]
        yield (
            f"  decoding's weight matmuls cross the ridge at batch {at:,}; its attention never does: each sequence "
            "reads its own cache"
            if at
            else "  decoding's weight matmuls never cross the ridge"
        )


def figures(name, row):
    return (
        f"  {name:<30}{si(row['flops'], 'FLOP'):>12}{mib(row['bytes']):>14}{row['intensity']:>11.1f}  {row['bound']:<8}"
        f"{row['seconds'] * 1e3:>8.3f} ms"
    )
