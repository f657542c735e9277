"""Every formula of the prediction with its numbers put in, in reading order: a page to follow with a pencil.

The sums are worked out here from the settings, and each is asserted to be what the fold over the schedule says.
"""

import re
from collections import Counter

from prediction import Timeline, expected_seconds, predict
from schedule import SIZES, schedule
from units import duration, mib, si


def explain(config, device, mfu):
    """Yield the page."""
    s = schedule(config, device)
    p = predict(config, device, mfu=mfu)
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


def parameters(c, model):
    """Yield the count: a matmul from k to n has k n weights, and a bias has n."""
    L, C, F, V, T, H, K, D = c.n_layer, c.n_embd, c.d_ff, c.vocab_size, c.block_size, c.n_head, c.n_kv_head, c.head_dim
    bias = int(c.bias)
    gain = C * (1 + bias * (c.norm == "layernorm"))
    ups = 2 if c.activation == "swiglu" else 1
    rows = []
    if c.model == "transformer":
        rows.append(("q, k and v", "C (H + 2K) D", (C + bias) * (H + 2 * K) * D))
        rows.append(("projection", "H D C", (H * D + bias) * C))
    rows.append(("up", "2 C F (gate and value)" if ups == 2 else "C F", (C + bias) * ups * F))
    rows.append(("down", "F C", (F + bias) * C))
    n_norms = 2 if c.model == "transformer" else 1
    rows.append(("norms", f"{n_norms} x C" + (" x 2" if gain > C else ""), n_norms * gain))
    block = sum(n for _, _, n in rows)
    yield f"\nParameters{' (biases included)' if bias else ''}"
    yield from (f"  {name:<26}{formula:<26}{n:>16,}" for name, formula, n in rows)
    yield f"  {'a block':<26}{'the sum':<26}{block:>16,}"
    outside = [("L blocks", f"{L} x {block:,}", L * block), ("token embedding", "V C", V * C)]
    if c.model == "mlp":
        m = c.mlp_context
        outside.append(("mixing m embeddings", "m C C", (m * C + bias) * C))
    elif c.pos == "learned":
        outside.append(("positions", "T C", T * C))
    outside.append(("last norm", "C" + (" x 2" if gain > C else ""), gain))
    outside.append(("head", "the embedding again" if c.tie_weights else "V C", 0 if c.tie_weights else V * C))
    yield from (f"  {name:<26}{formula:<26}{n:>16,}" for name, formula, n in outside)
    n_params = sum(n for _, _, n in outside)
    assert n_params == model["params"], (n_params, model["params"])
    yield f"  {'N, all parameters':<26}{'the sum':<26}{n_params:>16,}"
    yield f"  {'N_m, those of matmuls':<26}{'no lookups, no vectors':<26}{model['params_matmul']:>16,}"


def flops(c, p):
    """Yield the FLOPs: a multiplication and an addition per weight and token, twice that backward."""
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


def memory(s, m):
    """Yield the bytes: states by their dtype, activations buffer by buffer for one block, what meets at the peak."""
    c, t = s.config, Timeline(s)
    n = m["params"] // 4
    yield "\nMemory"
    for name, formula, n_bytes in (
        ("parameters", "4 N", m["params"]),
        ("gradients", "4 N", m["gradients"]),
        ("moments of AdamW", "8 N", m["optimizer"]),
    ):
        assert n_bytes == int(formula[0]) * n
        yield f"  {name:<26}{formula:<26}{mib(n_bytes):>16}"
    kept = [(b, count) for b, count in t.saved() if t.category(b) == "saved activations"]
    layer = {b: s.ops[t.first[b]].layer for b, _ in kept}
    first = [b for b, _ in kept if layer[b] == 0]
    yield f"  kept by one block's forward for its backward, of {c.dtype} matmuls:"
    merged = Counter()
    for b in first:
        shape = " x ".join(map(str, b.shape))
        merged[re.sub(r"blocks\.\d+\.", "", b.name), shape, SIZES[b.dtype]] += b.bytes
    yield from (
        f"    {name:<24}{f'{shape} x {size} bytes':<26}{mib(k):>16}" for (name, shape, size), k in merged.items()
    )
    block, outside = sum(b.bytes for b in first), sum(b.bytes for b, _ in kept if layer[b] is None)
    others = sum(b.bytes * count for b, count in kept) - outside - block
    yield f"  {'a block':<26}{'the sum':<26}{mib(block):>16}"
    yield f"  {'the other blocks':<26}{f'{c.n_layer - 1} of them':<26}{mib(others):>16}"
    yield f"  {'before and behind them':<26}{'embedding, last norm':<26}{mib(outside):>16}"
    assert block + others + outside == m["activations"]
    if c.loss_chunk:
        size, n = SIZES[c.dtype], min(c.loss_chunk, c.batch_size * c.block_size)
        formula = f"{size} x {n} x V"
        yield f"  {'logits of a chunk':<26}{formula:<26}{mib(size * n * c.vocab_size):>16}  of {n} tokens at a time"
    else:
        logits = 4 * c.batch_size * c.block_size * c.vocab_size
        yield f"  {'logits in float32':<26}{'4 B T V':<26}{mib(logits):>16}  and as much for their gradient, twice"
    yield f"  the peak is where most of this is alive at once: {m['peak_at']}"
    yield from (f"    {name:<50}{mib(k):>16}" for name, k in sorted(m["at_peak"].items(), key=lambda item: -item[1]))
    assert sum(m["at_peak"].values()) == m["peak"]
    yield f"  {'the peak':<26}{'the sum':<26}{mib(m['peak']):>16}"
    if m["kv_cache_per_token"]:
        formula = f"2 L K D x {m['kv_cache_per_token'] // (2 * c.n_layer * c.n_kv_head * c.head_dim)} bytes"
        yield f"  {'cache of one token':<26}{formula:<26}{m['kv_cache_per_token']:>10,} bytes"


def time(s, flops, t):
    """Yield the seconds: the sum of the operations where they were timed, else FLOPs over what is assumed attained."""
    yield "\nTime"
    if t["step_s"] is None:
        yield "  unknown: the peak of this device is not known"
        return
    if t["basis"] == "assumed":
        attained = f"{si(flops['per_step'])} / ({si(t['peak_flops'])} x {t['mfu']:g})"
        yield f"  a step      FLOPs / (peak x MFU) = {attained}"
        yield f"              = {duration(t['step_s'])}; the peak is {t['peak_source']}, the MFU assumed"
    else:
        device, peak, kinds, times = s.device, s.device.peak(s.config.dtype), Counter(), Counter()
        for op in (op for op in s.ops if op.kind):
            what = f"{op.kind} gradient" if op.is_gradient and op.kind != "add gradients" else op.kind
            kinds[what] += op.times * expected_seconds(op, device, peak, device.bandwidth)[0]
            times[what] += op.times
        for what, seconds in kinds.most_common():
            yield f"  {what:<26}{f'{times[what]:,} times':<26}{1e3 * seconds:>13.3f} ms"
        crossed = t["step_s"] - sum(kinds.values())
        yield f"  {'from core to core':<26}{'what another one wrote':<26}{1e3 * crossed:>13.3f} ms"
        yield f"  {'a step':<26}{'the sum':<26}{1e3 * t['step_s']:>13.3f} ms"
    yield f"  the run     {s.config.max_iters:,} steps = {duration(t['total_s'])}"
