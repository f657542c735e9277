"""Which implementation, dtype and tile size each operation uses. The model and the prediction both read this file, so
they cannot disagree. It needs no torch."""

# Autocast treats some operations differently on a CPU and on CUDA, so the model takes the dtype of each operation from
# this table. An entry (device kind, operation) overrides that of the operation on devices of this kind.
OP_DTYPES = {
    "matmul": "autocast",
    "row product": "autocast",  # a matmul with a single row, in generation
    "attention": "autocast",
    "tiled attention": "autocast",  # ops/attention.py; its matmuls are twice as fast in bfloat16 as in float32
    "norm": "float32",
    "rope": "float32",
    "softmax": "float32",
    "loss": "float32",
    "residual": "float32",
    "embedding": "float32",
    # Measured on two cores with bfloat16 matmuls: compared with float32, torch's fused kernel in bfloat16 takes 4 times
    # as long at T = 64, equally long at T = 256, and 0.8 times as long at T = 1,024. For one query and 900 keys it
    # takes 2.5 times as long.
    ("cpu", "attention"): "float32",
    # Measured on the same cores: 11 G weights/s in float32, which is the memory bandwidth, and 7.5 in bfloat16.
    ("cpu", "row product"): "float32",
}


def operation_dtype(kind, dtype, device_kind):
    """Return the dtype in which an operation of this kind computes if matmuls compute in `dtype`."""
    found = OP_DTYPES.get((device_kind, kind), OP_DTYPES.get(kind))
    assert found, f"operation {kind!r} is none of {[key for key in OP_DTYPES if isinstance(key, str)]}"
    return dtype if found == "autocast" else found


def attention_kind(dtype, device_kind, cached, dropout):
    """Return which attention is used: "attention" is torch's, "tiled attention" that of ops/attention.py on a CPU.

    `dtype` is the dtype of matmuls, `cached` whether there is a key-value cache, and `dropout` the rate on weights.
    """
    tiled = device_kind == "cpu" and dtype == "bfloat16" and not cached and not dropout
    return "tiled attention" if tiled else "attention"


# How much ops/loss.py and ops/attention.py compute at a time. The list of a step's operations uses the same numbers.
CPU_CACHE_FLOATS = 2**20  # float32 numbers that stay in a CPU's cache from one operation to the next
HEAD_COLUMNS = 2**13  # rows of the head's gradient that are computed at once, before they are added up in float32
MAX_SCORES_PER_TILE = 2**22
MIN_QUERIES_PER_TILE = 128  # matmuls with fewer rows are slower


def tile_size(g, length):
    """Return (queries, key-value heads) of a full tile, for g query heads per key-value head.

    A tile has a quarter of the sequence, so three eighths of all scores are left out. Smaller tiles would leave out
    more, but round more sums to 16 bits. A long sequence can therefore exceed MAX_SCORES_PER_TILE with a single head.
    """
    t = max(MIN_QUERIES_PER_TILE, -(-length // 4))
    return t, max(1, MAX_SCORES_PER_TILE // (g * t * length))


def score_tiles(n, g, length):
    """Yield the tiles of n key-value heads with g query heads each: (slice of the heads, slice of the queries)."""
    t, n_heads = tile_size(g, length)
    for head in range(0, n, n_heads):
        for start in range(0, length, t):
            yield slice(head, min(head + n_heads, n)), slice(start, min(start + t, length))


def auto_loss_chunk(tokens, vocab_size):
    """Return for how many tokens the logits are computed at a time: for all (None) if there are few logits."""
    if tokens * vocab_size <= 2**23:
        return None
    return min(tokens, 2 ** max(0, (2**25 // vocab_size).bit_length() - 1))  # the largest power of two within 2^25


SAVED_BY_COMPILING = 1e-9  # seconds per parameter and step by which AdamW is faster as one kernel, on two cores


def compiling_adamw_pays(n_params, steps):
    """Return whether compiling AdamW saves more time in a run on a CPU than the 3 to 10 s that the compiler takes."""
    return n_params * steps * SAVED_BY_COMPILING > 20  # seconds
