"""What each technique changes for a config: memory, FLOPs, and bytes moved.

If this trainer has the technique as a setting, both sides are predictions of a step. Otherwise, the printed line says
how the figures were calculated.
"""

from dataclasses import replace

from cli.units import mib, si
from estimate import cluster
from estimate.predict import predict
from estimate.step import generation_step, training_step
from estimate.tape import SIZES


def techniques(config, spec):
    """Return a row for each technique: (memory, FLOPs, bytes moved) without it and with it, and the reasons."""
    rows = [half_precision(config, spec), chunked_loss(config, spec)]
    if config.batch_size % 2 == 0:
        rows.append(accumulation(config, spec))
    if config.model == "transformer":
        rows.append(flash_attention(config, spec))
    rows += [recomputation(config, spec), sharding(config, spec)]
    if config.model == "transformer":
        rows.append(key_value_cache(config, spec))
    return rows


def row(name, against, without, with_it, why):
    """Return a row: the technique `name`, compared with `against`."""
    return {"technique": name, "against": against, "without": without, "with": with_it, "why": why}


def step_figures(config, spec):
    """Return (peak bytes, FLOPs, bytes moved) of a step."""
    p = predict(config, spec)
    moved = sum(op.bytes * op.times for op in training_step(config, spec).ops)
    return p["memory"]["peak"], p["flops"]["hardware_per_step"], moved


def half_dtype(config, spec):
    if config.dtype != "float32":
        return config.dtype
    return "bfloat16" if spec.has_matmul("bfloat16") else "float16"


def half_precision(config, spec):
    half = half_dtype(config, spec)
    sides = (step_figures(replace(config, dtype=dtype), spec) for dtype in ("float32", half))
    why = "matmuls, and what they save for backward, take 2 bytes; weights, gradients and moments stay float32"
    return row(f"{half} matmuls", "float32", *sides, why)


def chunked_loss(config, spec):
    chunk = config.loss_chunk or min(512, config.tokens_per_micro_step)
    sides = (step_figures(replace(config, loss_chunk=n), spec) for n in (None, chunk))
    why = "the logits of a few hundred tokens at a time, which their gradient overwrites"
    return row("chunked loss", "all logits at once", *sides, why)


def accumulation(config, spec):
    half_batch, twice = config.batch_size // 2, 2 * config.gradient_accumulation_steps
    halved = replace(config, batch_size=half_batch, gradient_accumulation_steps=twice)
    why = "half the activations, but the gradients stay in memory, and the weights are read twice as often"
    return row(
        "accumulation", "one micro-batch of twice the size", step_figures(config, spec), step_figures(halved, spec), why
    )


def flash_attention(config, spec):
    c, (memory, flops, moved) = config, step_figures(config, spec)
    scores = c.batch_size * c.n_head * c.block_size**2 * SIZES[half_dtype(c, spec)] * c.n_layer  # bytes
    # Forward writes and reads the scores and the softmax. Backward reads both, and writes and reads their gradients.
    passes = 4 + 6
    without = (memory + scores, flops, moved + passes * scores * c.gradient_accumulation_steps)
    why = "only a tile of scores at a time; backward computes them again, which is not counted (Dao et al. 2022)"
    return row("flash attention", "T x T scores, softmax saved", without, (memory, flops, moved), why)


def recomputation(config, spec):
    sides = (step_figures(replace(config, recompute=recompute), spec) for recompute in ("none", "block"))
    why = "each block saves only its input; backward executes the block again, except its last matmul"
    return row("recomputation", "all activations saved", *sides, why)


def sharding(config, spec):
    sequences = config.batch_size * config.gradient_accumulation_steps
    n = max(n for n in (8, 4, 2, 1) if sequences % n == 0)
    one, found = step_figures(config, spec), cluster.on_cluster(config, spec, n)
    moved = f"which also exchange {mib(found['moved_bytes'])} in a step"
    why = f"on each of {n} devices, {moved}; only calculated, not a setting of this version"
    return row(f"sharding (ZeRO-3), {n}", "one device", one, (found["peak"], one[1] // n, one[2] // n), why)


def key_value_cache(config, spec):
    T = config.block_size
    cache = predict(config, spec)["memory"]["kv_cache_per_token"] * T
    without, with_cache = (generation_step(config, spec, 1, new, T - new).ops for new in (T, 1))

    def total(ops, figure):
        return sum(getattr(op, figure) * op.times for op in ops)

    sides = [(n, total(ops, "flops"), total(ops, "bytes")) for n, ops in ((0, without), (cache, with_cache))]
    why = f"the last of {T:,} tokens of one sequence; the keys and values of the others are read, not computed"
    return row("key-value cache", "the whole context for each token", *sides, why)


def lines(rows):
    """Yield the table as text."""
    yield f"{'technique':<24}{'memory':>24}{'FLOPs':>20}{'bytes moved':>30}"
    for r in rows:
        (a, b, c), (x, y, z) = r["without"], r["with"]
        memory, flops, moved = (f"{show(p)} -> {show(q)}" for show, p, q in ((mib, a, x), (si, b, y), (mib, c, z)))
        yield f"{r['technique']:<24}{memory:>24}{flops:>20}{moved:>30}"
        yield f"    compared with {r['against']}"
        yield f"    {r['why']}"
    yield "memory is the peak of a step, or the size of the cache; bytes moved are all reads and writes, without fusion"
