"""The operations of each layer, in the order in which model.py executes them. There is one function per layer.

To add a layer, write it in model.py and describe its forward pass here. The tests compare the two: they check what
torch counts, saves for backward and allocates."""

from estimate.tape import Buffer
from ops.choices import CPU_CACHE_FLOATS, HEAD_COLUMNS, attention_kind, operation_dtype, score_tiles


def attention(tape, x, name):
    c = tape.config
    B, T, H, K, D = c.batch_size, c.block_size, c.n_head, c.n_kv_head, c.head_dim
    qkv = tape.linear(f"{name}.qkv", x, (H + 2 * K) * D, c.bias)
    q, k, v = tape.split(qkv, {"q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, D)})
    if c.qk_norm:
        q, k = tape.head_norm(q), tape.head_norm(k)
    if c.pos == "rope":
        q, k = (tape.cast(part, "float32") for part in (q, k))
        q, k = (rotate(tape, part) for part in (q, k))
    kind = attention_kind(c.dtype, tape.spec.kind, tape.past is not None, c.attn_dropout)
    dtype = operation_dtype(kind, c.dtype, tape.spec.kind)
    q, k, v = (tape.cast(part, dtype) for part in (q, k, v))
    if tape.past is not None:
        k, v = append_to_cache(tape, k, v)
    y = scaled_dot_product(tape, q, k, v, kind)
    return tape.linear(f"{name}.proj", y, c.n_embd, c.bias)


def rotate(tape, x):
    cos_sin = tape.rope_tables
    return tape.apply(f"{x.name} rotated", (x,), x.shape, "float32", cos_sin, constants=cos_sin, kind="rotate")


def append_to_cache(tape, k, v):
    """Append the new keys and values to the cache. Return all keys and all values of the layer."""
    B, T, K, D = k.shape
    L, S = tape.config.n_layer, tape.past + T
    caches = [Buffer(f"{part.name} cache", (L, B, S, K, D), part.dtype, "cache") for part in (k, v)]
    appended = [
        Buffer(f"new {part.name}", part.shape, part.dtype, base=cache)
        for part, cache in zip((k, v), caches, strict=True)
    ]
    tape.record("append to cache", (k, v), appended)
    tape.caches += caches
    return [
        Buffer(f"{part.name} of a layer", (B, S, K, D), part.dtype, base=cache)
        for part, cache in zip((k, v), caches, strict=True)
    ]


def scaled_dot_product(tape, q, k, v, kind):
    """softmax(q k^T) v, as one of three implementations computes it.

    Per query head, forward has two matmuls, and backward four: of v, the softmax, q and k. The half that the mask hides
    is counted as well.
    """
    c = tape.config
    if kind == "tiled attention":
        return tiled_attention(tape, q, k, v)
    if c.attn_dropout and tape.spec.kind == "cpu":
        return unfused_attention(tape, q, k, v)
    return fused_attention(tape, q, k, v)


def attention_matmuls(tape, q, k):
    """Return the two matmuls of forward, (count, m, k, n) each: q k^T, and the weights times v."""
    B, T, H, D = q.shape
    S = k.shape[1]
    return (B * H, T, D, S), (B * H, T, S, D)


def fused_attention(tape, q, k, v):
    """torch's fused kernel saves its inputs, its output and one number per row.

    Its backward computes the T x T scores again; the FLOPs of that are not counted here.
    """
    B, T, H, D = q.shape
    scores, values = attention_matmuls(tape, q, k)
    log_sum_exp = Buffer("log-sum-exp", (B, H, T), "float32")
    forward, backward = [scores, values], [values, scores, values, values]
    saved = (q, k, v, "output")
    return tape.apply("attention", (q, k, v), (B, T, H * D), q.dtype, saved, (log_sum_exp,), forward, backward)


def tiled_attention(tape, q, k, v):
    """ops/attention.py saves copies of its inputs in which the rows of each head are adjacent."""
    B, T, H, D = q.shape
    scores, values = attention_matmuls(tape, q, k)
    by_head = [Buffer(f"{part.name} by heads", part.shape, part.dtype) for part in (q, k, v)]
    matmuls = {"matmuls": [scores, values], "backward_matmuls": [values, scores, values, values]}
    forward, backward = ([((n,), q.dtype)] for n in tile_elements(B, H, tape.config.n_kv_head, T, D))
    return tape.apply(
        "attention", (q, k, v), (B, T, H * D), q.dtype, saved_outputs=by_head, **matmuls, scratch=forward,
        backward_scratch=backward, kind="tiled attention",
    )  # fmt: skip


def unfused_attention(tape, q, k, v):
    """With attn_dropout, a CPU has no fused kernel.

    It saves scaled copies of q and k, the softmax, the dropout mask, and the product of these two.
    """
    c, dtype = tape.config, q.dtype
    B, T, H, D = q.shape
    scores, values = attention_matmuls(tape, q, k)
    if c.n_kv_head != H:
        k, v = (tape.apply(f"{part.name} repeated", (part,), q.shape, dtype, kind="repeat") for part in (k, v))
    else:
        v = tape.apply("v by heads", (v,), v.shape, dtype)  # contiguous, for the batched matmul
    q, k = (tape.apply(f"{part.name} scaled", (part,), part.shape, dtype, kind="scale") for part in (q, k))
    weights = (B, H, T, T)
    logits = tape.apply("scores", (q, k), weights, dtype, (q, k), matmuls=[scores], backward_matmuls=[values, values])
    softmax = tape.apply("softmax", (logits,), weights, dtype, ("output",))
    dropped = tape.dropout(softmax, c.attn_dropout)
    y = tape.apply(
        "weighted values", (dropped, v), (B, H, T, D), dtype, (dropped, v), matmuls=[values],
        backward_matmuls=[values, scores],
    )  # fmt: skip
    return tape.apply("join heads", (y,), (B, T, H * D), dtype)


def tile_elements(B, H, K, T, D):
    """Return how many elements ops/attention.py allocates at most for a tile at a time: in forward, in backward.

    Inputs, outputs and saved tensors are not counted. Forward holds the result by heads, and a tile's scores with their
    mask or with the product that is computed from them. Backward holds the gradient by heads and, of a tile, its rows
    of that gradient, the weights, the weights' gradient and the scores' gradient.
    """
    whole, forward, backward = B * H * T * D, 0, 0
    for heads, queries in score_tiles(B * K, H // K, T):
        t = queries.stop - queries.start
        n_rows = (heads.stop - heads.start) * (H // K) * t
        scores, mask, rows = n_rows * queries.stop, t * t, n_rows * D
        copied = rows if K < H and t < T else 0  # the rows of several heads are not contiguous
        forward = max(forward, copied + scores, scores + mask, scores + rows)
        made = max(copied + scores, scores + mask, 3 * scores)
        backward = max(backward, copied + made, scores + rows)
    return whole + forward, whole + backward


def feed_forward(tape, x, name):
    c = tape.config
    inner = (*x.shape[:-1], c.d_ff)
    if c.is_gated:
        h = tape.linear(f"{name}.up", x, 2 * c.d_ff, c.bias)
        gate, value = tape.split(h, {"gate": inner, "value": inner})
        gate = tape.apply("silu", (gate,), inner, h.dtype, (gate,))
        h = tape.apply("gated", (gate, value), inner, h.dtype, (gate, value))
    else:
        h = tape.linear(f"{name}.up", x, c.d_ff, c.bias)
        if c.activation == "gelu":
            h = tape.apply("gelu", (h,), inner, h.dtype, (h,))
        else:
            h = tape.apply("relu", (h,), inner, h.dtype, ("output",))
            h = tape.apply("square", (h,), inner, h.dtype, (h,), backward_scratch=[(inner, h.dtype)])
    return tape.linear(f"{name}.down", h, c.n_embd, c.bias)


def block(tape, x, layer, repeat=1):
    """Record block number `layer`, which stands for `repeat` blocks."""
    c = tape.config
    recompute = c.recompute if tape.past is None else "none"

    def attend(normed):
        return attention(tape, normed, f"blocks.{layer}.attn")

    def run(x):
        tape.layer, tape.repeat = layer, repeat
        if c.model == "transformer":
            tape.group = "norm"
            normed = tape.norm(f"blocks.{layer}.norm1", x)
            tape.group = "attention"
            branch = tape.recompute(attend, normed) if recompute == "attention" else attend(normed)
            x = tape.add(x, tape.dropout(branch, c.dropout))
        tape.group = "norm"
        normed = tape.norm(f"blocks.{layer}.norm2", x)
        tape.group = "mlp"
        return tape.add(x, tape.dropout(feed_forward(tape, normed, f"blocks.{layer}.mlp"), c.dropout))

    tape.layer, tape.repeat = layer, repeat
    x = tape.recompute(run, x) if recompute == "block" else run(x)
    tape.layer, tape.repeat = None, 1
    return x


def embedding(tape, idx):
    """Look up rows of the table, whose gradient is dense. Then add learned positions, or mix a window of rows (MLP)."""
    c = tape.config
    B, T, C, m = c.batch_size, c.block_size, c.n_embd, c.mlp_context
    tape.group = "embedding"
    table = tape.param("wte", c.vocab_size, C)
    x = tape.apply("embedding", (table,), (B, T, C), "float32", (idx,), constants=(idx,))
    tape.ops[-1].reads = (idx, Buffer("rows of wte", x.shape, "float32", base=table))  # not the whole table
    if c.model == "mlp":
        x = tape.apply("padded", (x,), (B, T + m - 1, C), "float32")
        x = tape.apply("windows", (x,), (B, T, m * C), "float32")
        x = tape.cast(tape.linear("mix", x, C, c.bias), "float32")
    elif c.pos == "learned":
        x = tape.add(x, tape.param("wpe", T, C))
    return tape.dropout(x, c.dropout)


def loss(tape, x, targets):
    """The head and the cross-entropy. Without chunks, the logits, their softmax and its gradient are (B T, V) each."""
    c = tape.config
    rows, V = c.batch_size * c.block_size, c.vocab_size
    tape.group = "head"
    weight = tape.param("wte" if c.tie_weights else "head", V, c.n_embd)
    if c.loss_chunk:
        return chunked_loss(tape, tape.cast(x, operation_dtype("matmul", c.dtype, tape.spec.kind)), weight, targets)
    logits = tape.linear("logits", x, V, weight=weight)
    tape.group = "loss"
    logits = tape.cast(logits, "float32")
    log_softmax = tape.apply("log-softmax", (logits,), (rows, V), "float32", ("output",))
    n_targets = Buffer("number of targets", (), "float32")
    return tape.apply("loss", (log_softmax,), (), "float32", (targets,), (n_targets,), constants=(targets,))


def chunked_loss(tape, x, weight, targets):
    """The head and the cross-entropy of ops/loss.py, one chunk of tokens at a time.

    Forward computes the gradients of x and of the head too, and backward returns them. All chunks are alike, so one is
    recorded for all of them. A last chunk that is smaller is recorded apart.
    """
    c, micro_steps = tape.config, tape.micro_steps
    rows, total = c.batch_size * c.block_size, Buffer("loss", (), "float32")
    head = weight
    if x.dtype != weight.dtype:
        head = Buffer(f"{weight.name} in {x.dtype}", weight.shape, x.dtype, "copy")
        tape.record(head.name, (weight,), (head,), kind="cast", inputs=(weight,), output=head)
    dx = Buffer("gradient of x", x.shape, x.dtype)
    dweight = Buffer(f"gradient of {weight.name}", weight.shape, "float32")
    tape.record("zero the head's gradient", (), (dx, dweight), kind="zero", inputs=(weight,), output=dweight)
    n_chunks, rest = divmod(rows, c.loss_chunk)
    for n_tokens, count in ((c.loss_chunk, n_chunks), (rest, min(rest, 1))):
        if count:
            tape.micro_steps = micro_steps * count
            loss_of_chunk(tape, n_tokens, x, dx, head, dweight, targets, total)
    tape.micro_steps = micro_steps

    def record_gradient():
        tape.gradients.pop(total)
        tape.record("return the gradients", (dx, dweight), ())
        tape.add_gradient(x, dx)
        tape.add_gradient(weight, dweight)

    tape.on_backward(record_gradient)
    return total


def loss_of_chunk(tape, n_tokens, x, dx, head, dweight, targets, total):
    """Record a chunk of n_tokens: its logits, their gradient in the same memory, and its parts of dx and dweight."""
    n, (V, C) = n_tokens, head.shape
    part, dpart = (Buffer(f"{b.name} of a chunk", (n, C), x.dtype, base=b) for b in (x, dx))
    logits = Buffer("logits of a chunk", (n, V), x.dtype)
    columns = Buffer("gradient of columns", (min(V, HEAD_COLUMNS), C), x.dtype)
    in_cache = min(n, max(1, CPU_CACHE_FLOATS // V)) if tape.spec.kind == "cpu" else n
    scratch = [Buffer("a few numbers a row", (in_cache, 4), "float32")]
    if x.dtype != "float32":  # a float32 softmax overwrites the logits
        scratch.append(Buffer("softmax", (in_cache, V), "float32"))

    def record(name, kind, inputs, output, writes, matmuls=()):
        tape.record(name, inputs, writes, matmuls, kind, inputs, output)

    tape.group = "head"
    record("chunk's logits", "linear", (part, head), logits, (logits,), [(1, n, C, V)])
    tape.group = "loss"
    writes = (logits, total, *scratch)
    record("chunk's logits into their gradient", "chunk loss", (logits, targets), total, writes)
    tape.group = "head"
    inputs, writes = (logits, part, dweight), (dweight, columns)
    record("chunk's gradient of the head", "chunk gradient of head", inputs, dweight, writes, [(1, V, n, C)])
    record("chunk's gradient of x", "chunk gradient of x", (logits, head), dpart, (dpart,), [(1, n, V, C)])
