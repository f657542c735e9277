"""Where the time goes: the FLOPs and bytes of each operation, their ratio, and which of the two bounds its time.

An operation takes at least flops / peak and at least bytes / bandwidth, so at least the larger of the two. The ratio
flops / bytes is its arithmetic intensity. If the intensity is above the ridge point of the device, peak / bandwidth,
the operation is compute-bound, otherwise memory-bound (Williams et al. 2009). Only the FLOPs of matmuls are counted, so
all other operations are memory-bound on any device.
"""

from collections import defaultdict

from cli.errors import require
from cli.units import mib, si
from estimate.step import generation_step, training_step

N_PRINTED = 16  # operations; --json shows all of them
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of decoding


def table(ops, peak, bandwidth, by=("phase", "group")):
    """Return a row for each phase and group, or for other fields: FLOPs, bytes, intensity, bound, least seconds.

    The figures are those of a whole step, in which some operations are executed many times.
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
    """Return a row with its intensity, and with its bound: "compute" if most of its time is compute-bound."""
    bound = "compute" if row["compute_seconds"] > row["seconds"] / 2 else "memory"
    return {**row, "intensity": row["flops"] / row["bytes"] if row["bytes"] else 0.0, "bound": bound}


def total(rows):
    return summary({key: sum(row[key] for row in rows) for key in ("flops", "bytes", "seconds", "compute_seconds")})


def inference(config, spec, new, past, batch_size):
    """Return the totals of one forward pass of generation, and the totals of its matmuls with weights alone."""
    peak, bandwidth = spec.peak(config.dtype), spec.bandwidth
    ops = generation_step(config, spec, batch_size, new, past).ops
    weights = [op for op in ops if op.matmuls and not op.is_attention]
    return total(table(ops, peak, bandwidth)), total(table(weights, peak, bandwidth))


def compute_bound_batch(config, spec, past):
    """Return the least batch size at which the weight matmuls of decoding are compute-bound; None if there is none.

    A weight of k x n elements is read once for all sequences. In 16 bits, its matmul has 2 B k n FLOPs and 2 (k n + B k
    + B n) bytes, so the intensity is about B as long as B is much smaller than k and n. For wide layers the batch size
    is therefore near the ridge, and for narrow layers above it. This does not hold for attention: each sequence has a
    separate cache, so the batch size does not change its intensity.
    """
    low, high = 0, 1
    ridge = spec.peak(config.dtype) / spec.bandwidth

    def is_compute_bound(batch_size):
        return inference(config, spec, 1, past, batch_size)[1]["intensity"] >= ridge

    while not is_compute_bound(high):
        if high >= 2**20:
            return None
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high


def roofline(config, spec):
    """Return the roofline of a training step and of generation. The peak and the bandwidth have to be known."""
    peak, bandwidth = spec.peak(config.dtype), spec.bandwidth
    require(peak, f"the peak of {spec.name} in {config.dtype} is not known: name a card with --gpu, or train here once")
    require(bandwidth, f"the memory bandwidth of {spec.name} is not known; name a card with --gpu")
    ops = training_step(config, spec).ops
    rows = table(ops, peak, bandwidth)
    result = {"ridge": peak / bandwidth, "step": rows, "total": total(rows)}
    result["operations"] = table(ops, peak, bandwidth, ("phase", "group", "label"))
    if spec.link:  # the next batch is copied while the step computes
        n_bytes = 2 * 8 * config.batch_size * config.block_size * config.gradient_accumulation_steps
        result["batch_copy"] = {"bytes": n_bytes, "seconds": n_bytes / spec.link, "bound": "link"}
    if config.model == "transformer":
        past = config.block_size - 1
        prefill = inference(config, spec, config.block_size, 0, 1)[0]
        decode = [{"batch_size": b, **inference(config, spec, 1, past, b)[0]} for b in BATCHES]
        result |= {"prefill": prefill, "decode": decode, "compute_bound_batch": compute_bound_batch(config, spec, past)}
    return result


def lines(config, spec):
    """Yield the roofline as text."""
    r = roofline(config, spec)
    yield (
        f"roofline    {spec.name}: {si(spec.peak(config.dtype), 'FLOP/s')} in {config.dtype} over "
        f"{spec.bandwidth / 1e9:,.0f} GB/s; ridge at {r['ridge']:.0f} FLOP/byte"
    )
    yield f"  {'a training step':<30}{'FLOPs':>12}{'bytes':>14}{'FLOP/byte':>11}  {'bound':<8}{'at least':>11}"
    for row in [*r["step"], {"phase": "in all", "group": "", **r["total"]}]:
        name = f"{row['phase']} {row['group']}".strip() if row["phase"] != row["group"] else row["phase"]
        yield figures(name, row)
    if copy := r.get("batch_copy"):
        what = f"{mib(copy['bytes'])} from the host over {spec.link / 1e9:,.1f} GB/s"
        yield f"  at the same time, the next batch is copied: {what}, {copy['seconds'] * 1e3:.3f} ms"
    operations = sorted(r["operations"], key=lambda row: -row["seconds"])
    n = min(len(operations), N_PRINTED)
    yield f"  the {n} longest of {len(operations)} operations, summed over all blocks; times are lower bounds"
    for row in operations[:N_PRINTED]:
        yield figures(row["label"], row)
    if "decode" in r:
        yield f"  generation, context {config.block_size}; the times are lower bounds"
        yield figures("prefill, batch 1", r["prefill"])
        for row in r["decode"]:
            yield figures(f"decode, batch {row['batch_size']}", row)
        at = r["compute_bound_batch"]
        yield (
            f"  the weight matmuls of decoding are compute-bound from batch {at:,} on; its attention never is, because "
            "each sequence has a separate cache"
            if at
            else "  the weight matmuls of decoding are memory-bound at any batch size"
        )


def figures(name, row):
    return (
        f"  {name:<30}{si(row['flops'], 'FLOP'):>12}{mib(row['bytes']):>14}{row['intensity']:>11.1f}  {row['bound']:<8}"
        f"{row['seconds'] * 1e3:>8.3f} ms"
    )
