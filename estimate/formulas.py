"""Every formula of the prediction with its numbers, in reading order: a page that a reader can check with a pencil.

The sums are computed here from the settings. Each is asserted to equal what the prediction computes from the list of
operations.
"""

import re
from collections import Counter

from cli.units import duration, mib, si
from estimate.memory import Timeline
from estimate.predict import predict
from estimate.report import BASIS, band
from estimate.step import training_step
from estimate.step_time import expected_seconds
from estimate.tape import SIZES


def explain(config, spec, mfu):
    """Yield the page, line by line."""
    s = training_step(config, spec)
    p = predict(config, spec, mfu=mfu)
    yield from letters(config)
    yield from parameters(config, p["model"])
    yield from flops(config, p)
    yield from memory(s, p["memory"])
    yield from time(s, p["flops"], p["time"])


def letters(c):
    yield "Letters"
    yield f"  B = {c.batch_size} sequences, T = {c.block_size} tokens, A = {c.gradient_accumulation_steps} micro-steps"
    yield f"  L = {c.n_layer} blocks, C = {c.n_embd} width, F = {c.d_ff} inside the MLP, V = {c.vocab_size} vocabulary"
    if c.model == "transformer":
        yield f"  H = {c.n_head} heads, K = {c.n_kv_head} key-value heads, D = {c.head_dim} head width"
    else:
        yield f"  m = {c.mlp_context} tokens whose embeddings are concatenated"


def table(rows):
    """Yield a line for each (name, formula, integer)."""
    return (f"  {name:<26}{formula:<26}{n:>16,}" for name, formula, n in rows)


# --- parameters


def parameters(c, model):
    """Yield the count. A matmul from k to n has k n weights, and its bias has n."""
    block = parameters_of_block(c)
    outside = parameters_outside_blocks(c, sum(n for _, _, n in block))
    n_params = sum(n for _, _, n in outside)
    assert n_params == model["params"], (n_params, model["params"])
    yield f"\nParameters{' (biases included)' if c.bias else ''}"
    yield from table([*block, ("a block", "the sum", sum(n for _, _, n in block))])
    yield from table([*outside, ("N, all parameters", "the sum", n_params)])
    yield from table([("N_m, those in matmuls", "no lookups, no vectors", model["params_matmul"])])


def gain(c):
    """Return (the parameters of a norm, how its formula goes on)."""
    has_bias = c.bias and c.norm == "layernorm"
    return (2 * c.n_embd, " x 2") if has_bias else (c.n_embd, "")


def parameters_of_block(c):
    """Return the rows of a block: (name, formula, number)."""
    C, F, H, K, D, bias = c.n_embd, c.d_ff, c.n_head, c.n_kv_head, c.head_dim, int(c.bias)
    rows, n_norms, (of_norm, twice) = [], 1, gain(c)
    if c.model == "transformer":
        rows.append(("q, k and v", "C (H + 2K) D", (C + bias) * (H + 2 * K) * D))
        rows.append(("projection", "H D C", (H * D + bias) * C))
        n_norms = 2
    if c.is_gated:
        rows.append(("up", "2 C F (gate and value)", (C + bias) * 2 * F))
    else:
        rows.append(("up", "C F", (C + bias) * F))
    rows.append(("down", "F C", (F + bias) * C))
    rows.append(("norms", f"{n_norms} x C{twice}", n_norms * of_norm))
    return rows


def parameters_outside_blocks(c, block):
    """Return the rows of the whole model: (name, formula, number); a block has `block` parameters."""
    L, C, V, T, m = c.n_layer, c.n_embd, c.vocab_size, c.block_size, c.mlp_context
    rows, (of_norm, twice) = [("L blocks", f"{L} x {block:,}", L * block), ("token embedding", "V C", V * C)], gain(c)
    if c.model == "mlp":
        rows.append(("mixing m embeddings", "m C C", (m * C + int(c.bias)) * C))
    elif c.pos == "learned":
        rows.append(("positions", "T C", T * C))
    rows.append(("last norm", f"C{twice}", of_norm))
    rows.append(("head", "the embedding again", 0) if c.tie_weights else ("head", "V C", V * C))
    return rows


# --- FLOPs


def flops(c, p):
    """Yield the FLOPs. For each weight and token, forward multiplies and adds once, and backward does so twice."""
    n_matmul, per_token = p["model"]["params_matmul"], p["flops"]["per_token"]
    yield "\nFLOPs a token"
    yield f"  {'weights':<26}{'6 N_m':<26}{6 * n_matmul:>16,}  2 forward, 2 for inputs, 2 for weights"
    total = 6 * n_matmul
    if c.model == "transformer":
        pairs = 12 * c.n_layer * c.n_head * c.head_dim * c.block_size
        yield f"  {'scores and values':<26}{'3 x 2 x 2 L H D T':<26}{pairs:>16,}  each token with T, masked or not"
        total += pairs
    assert total == per_token, (total, per_token)
    yield f"  {'in all':<26}{'the sum':<26}{total:>16,}"
    six_n = p["flops"]["six_nd_per_token"]
    yield f"  {'the usual estimate':<26}{'6 N':<26}{six_n:>16,}  {six_n / total:.3f} of the exact count"
    tokens = c.tokens_per_step
    yield f"  {'a step':<26}{'x B T A tokens':<26}{tokens * total:>16,}  = {si(tokens * total, 'FLOP')}"
    assert tokens * total == p["flops"]["per_step"]


# --- memory


def memory(s, m):
    """Yield the bytes of the states, of the activations that one block saves, and of all that is alive at the peak."""
    n_params = m["params"] // 4
    yield "\nMemory"
    for name, factor, n_bytes in (
        ("parameters", 4, m["params"]),
        ("gradients", 4, m["gradients"]),
        ("moments of AdamW", 8, m["optimizer"]),
    ):
        assert n_bytes == factor * n_params
        yield f"  {name:<26}{f'{factor} N':<26}{mib(n_bytes):>16}"
    yield from saved_activations(s, m)
    yield logits(s.config)
    yield f"  the peak is in {m['peak_at']}; alive at that moment:"
    yield from (f"    {name:<50}{mib(n):>16}" for name, n in sorted(m["at_peak"].items(), key=lambda item: -item[1]))
    assert sum(m["at_peak"].values()) == m["peak"]
    yield f"  {'the peak':<26}{'the sum':<26}{mib(m['peak']):>16}"
    if m["kv_cache_per_token"]:
        c = s.config
        formula = f"2 L K D x {m['kv_cache_per_token'] // (2 * c.n_layer * c.n_kv_head * c.head_dim)} bytes"
        yield f"  {'cache of one token':<26}{formula:<26}{m['kv_cache_per_token']:>10,} bytes"


def saved_activations(s, m):
    """Yield what the forward of one block saves for backward, then the sums over all blocks."""
    c, t = s.config, Timeline(s)
    saved = [(b, count) for b, count in t.saved() if t.category(b) == "saved activations"]
    layer = {b: s.ops[t.first[b]].layer for b, _ in saved}
    of_block = [b for b, _ in saved if layer[b] == 0]
    yield f"  saved by the forward of one block for its backward, with {c.dtype} matmuls:"
    merged = Counter()
    for b in of_block:
        shape = " x ".join(map(str, b.shape))
        merged[re.sub(r"blocks\.\d+\.", "", b.name), f"{shape} x {SIZES[b.dtype]} bytes"] += b.bytes
    yield from (f"    {name:<24}{formula:<26}{mib(n):>16}" for (name, formula), n in merged.items())
    block, outside = sum(b.bytes for b in of_block), sum(b.bytes for b, _ in saved if layer[b] is None)
    others = sum(b.bytes * count for b, count in saved) - outside - block
    yield f"  {'a block':<26}{'the sum':<26}{mib(block):>16}"
    yield f"  {'the other blocks':<26}{f'{c.n_layer - 1} of them':<26}{mib(others):>16}"
    yield f"  {'before and after them':<26}{'embedding, last norm':<26}{mib(outside):>16}"
    assert block + others + outside == m["activations"]


def logits(c):
    if c.loss_chunk:
        size, n = SIZES[c.dtype], min(c.loss_chunk, c.tokens_per_micro_step)
        formula = f"{size} x {n} x V"
        return f"  {'logits of a chunk':<26}{formula:<26}{mib(size * n * c.vocab_size):>16}  for {n} tokens at a time"
    n_bytes = 4 * c.tokens_per_micro_step * c.vocab_size
    return f"  {'logits in float32':<26}{'4 B T V':<26}{mib(n_bytes):>16}  and twice as much for their gradient"


# --- time


def time(s, flops, t):
    """Yield the seconds: FLOPs over the attained FLOP/s, or the sum of the operations if they were timed."""
    yield "\nTime"
    if t["step_s"] is None:
        yield "  unknown: the peak of this device is not known"
        return
    if t["basis"] in ("assumed", "given"):
        attained = f"{si(flops['per_step'])} / ({si(t['peak_flops'])} x {t['mfu']:g})"
        yield f"  a step      FLOPs / (peak x MFU) = {attained}"
        yield f"              = {duration(t['step_s'])}; the peak is {t['peak_source']}, {BASIS[t['basis']]}"
        yield f"              between {band(t)}"
    else:
        yield from times_of_operations(s, t)
    yield f"  the run     {s.config.max_iters:,} steps = {duration(t['total_s'])}"


def times_of_operations(s, t):
    """Yield the time of each kind of operation, the longest first, and the sum."""
    spec, seconds, times = s.spec, Counter(), Counter()
    peak = spec.peak(s.config.dtype)
    for op in (op for op in s.ops if op.kind):
        kind = f"{op.kind} gradient" if op.is_gradient and op.kind != "add gradients" else op.kind
        seconds[kind] += op.times * expected_seconds(op, spec, peak, spec.bandwidth)[0]
        times[kind] += op.times
    for kind, total in seconds.most_common():
        yield f"  {kind:<26}{f'{times[kind]:,} times':<26}{1e3 * total:>13.3f} ms"
    between_cores = t["step_s"] - sum(seconds.values())
    yield f"  {'from core to core':<26}{'to read what another wrote':<26}{1e3 * between_cores:>13.3f} ms"
    yield f"  {'a step':<26}{'the sum':<26}{1e3 * t['step_s']:>13.3f} ms"
