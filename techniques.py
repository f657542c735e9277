"""What each technique changes for a config: in memory, in compute, in bytes moved.

Where this trainer has the technique as a setting, both sides are predictions of a step; where it has not, the line says
what it rests on.
"""

from dataclasses import replace

import cluster
from prediction import predict
from schedule import SIZES, generation, schedule
from units import mib, si


def step(config, device):
    """Return (peak bytes, FLOPs, bytes moved) of a step."""
    p = predict(config, device)
    moved = sum(op.bytes * op.times for op in schedule(config, device).ops)
    return p["memory"]["peak"], p["flops"]["hardware_per_step"], moved


def techniques(config, device):
    """Return a row per technique: what it is held against, (memory, FLOPs, moved) without and with it, and why."""
    c, here = config, step(config, device)
    rows = []

    def row(name, against, without, with_it, why):
        rows.append({"technique": name, "against": against, "without": without, "with": with_it, "why": why})

    half = c.dtype if c.dtype != "float32" else "bfloat16" if device.has_matmul("bfloat16") else "float16"
    why = "matmuls and what they keep take 2 bytes; weights, gradients and moments stay float32"
    row(f"{half} matmuls", "float32", *(step(replace(c, dtype=t), device) for t in ("float32", half)), why)

    chunk = c.loss_chunk or min(512, c.tokens_per_micro_step)
    why = "a few hundred tokens' logits at a time, turned into their gradient in place"
    row("chunked loss", "all logits at once",
        *(step(replace(c, loss_chunk=n), device) for n in (None, chunk)), why)  # fmt: skip

    if c.batch_size % 2 == 0:
        halved = replace(c, batch_size=c.batch_size // 2, gradient_accumulation_steps=2 * c.gradient_accumulation_steps)
        why = "half the activations, but gradients stay meanwhile, and weights are read twice as often"
        row("accumulation", "one micro-batch of twice the size", here, step(halved, device), why)

    if c.model == "transformer":
        scores = c.batch_size * c.n_head * c.block_size**2 * SIZES[half] * c.n_layer
        times = 4 + 6  # forward: scores and softmax, each written and read; backward: both read, their gradients too
        without = (here[0] + scores, here[1], here[2] + times * scores * c.gradient_accumulation_steps)
        why = "a tile of scores at a time, none kept: backward computes them again, uncounted here (Dao et al. 2022)"
        row("flash attention", "T x T scores, softmax kept", without, here, why)

    kept, again = (step(replace(c, recompute=how), device) for how in ("none", "block"))
    why = "each block keeps its input, and backward runs it again but for its last matmul"
    row("recomputation", "all activations kept", kept, again, why)

    sequences = c.batch_size * c.gradient_accumulation_steps
    n = max(n for n in (8, 4, 2, 1) if sequences % n == 0)
    found = cluster.on_cluster(c, device, n)
    why = (
        f"each of {n} devices; {mib(found['moved_bytes'])} more between them: arithmetic, not a setting of this version"
    )
    row(f"sharding (ZeRO-3), {n}", "one device", here, (found["peak"], here[1] // n, here[2] // n), why)

    if c.model == "transformer":
        T = c.block_size
        cache = predict(c, device)["memory"]["kv_cache_per_token"] * T
        whole, one = (generation(c, device, 1, new, T - new).ops for new in (T, 1))
        (f0, m0), (f1, m1) = ([sum(getattr(op, k) * op.times for op in ops) for k in ("flops", "bytes")]
                              for ops in (whole, one))  # fmt: skip
        why = f"the last of {T:,} tokens of one sequence: the others' keys and values are read, not computed"
        row("key-value cache", "the whole context for each token", (0, f0, m0), (cache, f1, m1), why)
    return rows


def lines(rows):
    """Yield the table as text."""
    yield f"{'technique':<24}{'memory':>24}{'FLOPs':>20}{'bytes moved':>30}"
    for r in rows:
        (a, b, c), (x, y, z) = r["without"], r["with"]
        memory, flops, moved = (f"{show(p)} -> {show(q)}" for show, p, q in ((mib, a, x), (si, b, y), (mib, c, z)))
        yield f"{r['technique']:<24}{memory:>24}{flops:>20}{moved:>30}"
        yield f"    against {r['against']}"
        yield f"    {r['why']}"
    yield "memory is a step's peak (the cache's: the cache); bytes moved: each operation's reads and writes, none fused"
