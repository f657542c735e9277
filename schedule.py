"""What a training step does: its operations in the order they run, each with the buffers it reads and writes.

Everything that prediction.py says of a run is a fold over this list. A layer is described by the operations of its
forward, in the order model.py makes them; the tape derives the backward as autograd would. To add a layer, describe it
here and write it there: the tests hold the two together, by what torch counts, saves and allocates.
"""

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from hardware import CACHED_NUMBERS, HEAD_COLUMNS, attention_kind, operation_dtype, score_tiles

RANDOM_STATE = 5056  # bytes of a CPU's generator
SIZES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}  # bytes


# --- buffers, operations, and the tape that records them


@dataclass(eq=False)
class Buffer:
    """A tensor. kind: param state grad batch table cache copy (of a weight) activation. A view lives in its base."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "activation"
    base: "Buffer | None" = None
    repeat: int = 1  # of what stands: how many layers have one like it
    transposed: bool = False  # a matmul's gradient of its weight, to which autograd does not add in place

    def __post_init__(self):
        self.numel = math.prod(self.shape)
        self.bytes = self.numel * SIZES[self.dtype]
        self.storage = self.base or self


@dataclass(eq=False)
class Op:
    """One operation. A buffer lives from its first write to its last read."""

    name: str
    group: str  # embedding attention mlp norm head loss optimizer
    phase: str  # forward backward optimizer
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    matmuls: tuple[tuple[int, int, int, int], ...] = ()  # (count, m, k, n): 2 count m k n FLOPs
    times: int = 1  # how often a step runs it
    layer: int | None = None  # of which block it is
    repeat: int = 1  # how many blocks, from that one on, it stands for
    kind: str = ""  # what is computed, from what, to what: the same for an operation and for its gradient
    inputs: tuple[Buffer, ...] = ()
    output: Buffer | None = None
    again: bool = False  # whether it repeats in backward what forward did and did not keep

    @property
    def flops(self):
        return sum(2 * count * m * k * n for count, m, k, n in self.matmuls)

    @property
    def is_attention(self):
        """Whether its matmuls are those of scores and values, which see each pair of positions."""
        return self.kind in ("attention", "tiled attention", "scores", "weighted values")

    @property
    def is_gradient(self):
        return self.phase == "backward" and not self.again

    @property
    def bytes(self):
        """Bytes moved if each buffer is read or written once, which no kernel can undercut; a view moves none."""
        read = {buffer.storage for buffer in self.reads}
        if all(buffer.base and buffer.storage in read for buffer in self.writes):  # or if it writes nothing: it frees
            return 0
        return sum(buffer.bytes for buffer in (*self.reads, *self.writes))

    @property
    def cached_bytes(self):
        """Bytes of those buffers that may still be in a cache when the next operation reads them."""
        return sum(buffer.bytes for buffer in (*self.reads, *self.writes) if self.bytes and buffer.bytes <= 2**24)

    def least_seconds(self, peak, bandwidth):
        """Return what it takes at least, once: peak in FLOP/s and bandwidth in bytes/s bound it both."""
        return max(self.flops / peak, self.bytes / bandwidth)

    @property
    def label(self):
        """The name without the block's: the same in every block."""
        return re.sub(r"blocks\.\d+\.", "", self.name).replace(": gradient", " gradient")

    @property
    def key(self):
        """Return (what, of which shapes) as text: operations of one key take the same time."""
        buffers = (*self.inputs, self.output)
        dtypes, shapes = [b.dtype for b in buffers], ["x".join(map(str, b.shape)) or "1" for b in buffers]
        kind = f"{self.kind} gradient" if self.is_gradient else self.kind
        return f"{kind}: {', '.join(dtypes[:-1])} -> {dtypes[-1]}", f"{', '.join(shapes[:-1])} -> {shapes[-1]}"

    @property
    def touched(self):
        return {buffer.storage: None for buffer in self.reads + self.writes}  # a set that keeps its order


class Tape:
    """Record operations forward; `backward` then records their gradients in reverse, as autograd runs them.

    Autograd's rules, which decide what is alive when: an operation's gradient frees what its forward saved once all its
    outputs are made; the first gradient to reach a tensor is kept as it is, later ones are added in place; a
    parameter's gradient is complete after its last use, and is then kept, or added to the one that is there.
    """

    def __init__(self, config, device, past=None):
        self.config, self.device = config, device
        self.past = past  # positions in the key-value cache; None: training, which has none
        self.caches, self.copies, self.angles = [], {}, ()
        if config.model == "transformer" and config.pos == "rope":
            table = (config.block_size, 1, config.head_dim // 2)
            self.angles = tuple(Buffer(name, table, "float32", "table") for name in ("cos", "sin"))
        self.ops, self.undo = [], []
        self.params, self.uses = {}, Counter()
        self.gradient, self.grads = {}, {}  # on their way, by buffer; complete, by parameter
        self.group, self.phase, self.micro_steps, self.layer, self.repeat = "", "forward", 1, None, 1
        self.again = False

    def param(self, name, *shape):
        parameter = self.params.setdefault(name, Buffer(name, shape, "float32", "param", repeat=self.repeat))
        self.uses[parameter] += 1
        return parameter

    def emit(self, name, reads, writes, matmuls=(), computes=("", (), None)):
        where, times = (self.group, self.phase), self.micro_steps * self.repeat
        name = f"{name}, again" if self.again else name
        place = times, self.layer, self.repeat
        self.ops.append(Op(name, *where, tuple(reads), tuple(writes), tuple(matmuls), *place, *computes, self.again))

    def apply(
        self, name, inputs, shape, dtype, saved=(), extra=(), matmuls=(), back=(), temps=(), kind=None, constants=(),
        scratch=(),
    ):  # fmt: skip
        """Record an operation and return its output.

        saved: what its gradient reads, "output" standing for the output; extra: further outputs, saved as well; back:
        the matmuls of its gradient; scratch and temps: (shape, dtype) of buffers that live only while the operation
        is computed, or its gradient; constants: what it reads beside its inputs, and what has no gradient.
        """
        y = Buffer(name, tuple(shape), dtype)
        saved = tuple(y if s == "output" else s for s in saved) + tuple(extra)
        computes = (kind or name, (*inputs, *constants), y)
        scratch = [Buffer(f"temporary of {name}", *of) for of in scratch]
        self.emit(name, (*inputs, *constants), (y, *extra, *scratch), matmuls, computes)

        def gradient():
            dy = self.gradient.pop(y)
            results = [Buffer(f"gradient of {x.name}", x.shape, x.dtype) for x in inputs]
            if kind == "linear":
                results[1].transposed = True
            scratch = [Buffer(f"temporary of {name}", shape, dtype) for shape, dtype in temps]
            self.emit(f"{name}: gradient", (dy, *saved), (*results, *scratch), back, computes)
            for x, result in zip(inputs, results, strict=True):
                self.arrive(x, result)

        self.on_backward(gradient, saved)
        return y

    def arrive(self, x, gradient):
        """Take a gradient of x that has been computed."""
        earlier, total = self.gradient.get(x), gradient
        if earlier:
            total = Buffer(f"gradient of {x.name}", x.shape, x.dtype) if earlier.transposed else earlier
            both = (earlier, gradient)
            self.emit(f"add gradients of {x.name}", both, (total,), computes=("add gradients", both, total))
        self.gradient[x] = total
        if x.kind == "param":
            self.uses[x] -= 1
            if not self.uses[x]:
                complete = self.gradient.pop(x)
                if x in self.grads:
                    both = (self.grads[x], complete)
                    computes = ("add gradients", both, self.grads[x])
                    self.emit(f"accumulate gradient of {x.name}", both, (self.grads[x],), computes=computes)
                else:
                    complete.kind = "grad"
                    self.grads[x] = complete

    def on_backward(self, gradient, saved=()):
        """Have gradient() record the operations that undo what was just recorded, as part of the same layer."""
        self.undo.append((self.group, self.layer, self.repeat, gradient, self.ops[-1] if saved else None))

    def backward(self, loss):
        self.phase = "backward"
        self.gradient[loss] = Buffer("gradient of loss", loss.shape, loss.dtype)
        while self.undo:
            self.group, self.layer, self.repeat, gradient, _ = self.undo.pop()
            gradient()
        self.phase, self.layer, self.repeat = "forward", None, 1

    def recomputed(self, run, x):
        """Record run(x) so that only its result stays of what it makes: backward runs it again (torch's checkpoint).

        Again up to the last operation that keeps something, which is not computed: what it keeps are its inputs. And
        only once the first gradient wants what was kept.
        """
        mark, uses, state = len(self.undo), self.uses.copy(), ()
        if (self.config.dropout or self.config.attn_dropout) and self.device.kind == "cpu":
            state = (Buffer("state of the random generator", (RANDOM_STATE,), "bool"),)
            self.emit("keep the random state", (), state)
        y = run(x)
        del self.undo[mark:]
        self.uses = uses

        def gradient():
            mark, before, copies = len(self.undo), self.ops, self.copies
            self.ops, self.copies, self.again = [], {}, True
            self.gradient[run(x)] = self.gradient.pop(y)
            undo = self.undo[mark:]
            del self.undo[mark:]
            last = next(op for *_, op in reversed(undo) if op)
            again = self.ops[: self.ops.index(last)]
            self.ops = []
            now = tuple(dataclasses.replace(own) for own in state)  # the generator's own, put back at the end
            self.emit("go back to the random state", state, now)
            again, self.ops = [*self.ops, *again], []
            if last.kind == "dropout":  # its mask is made before what it masks
                again.append(dataclasses.replace(last, writes=last.writes[1:]))
            self.emit("leave autocast", (*self.copies.values(), *now), ())
            again += self.ops
            self.ops, self.copies, self.again = before, copies, False
            for self.group, self.layer, self.repeat, undo_one, saving in reversed(undo):
                if saving and again:
                    self.ops += again
                    again = ()
                undo_one()
            self.emit("forget the inputs", (x, *state), ())

        self.on_backward(gradient)
        return y

    # --- operations that layers share

    def cast(self, x, dtype):
        if x.dtype == dtype:
            return x
        if x.kind == "param" and self.past is not None:  # generation converts the weights once, for all its tokens
            return self.copies.setdefault(x, Buffer(f"{x.name} in {dtype}", x.shape, dtype, "copy"))
        y = self.apply(f"{x.name} in {dtype}", (x,), x.shape, dtype, kind="cast")
        if x.kind == "param":
            y.kind = "copy"
            self.copies[x] = y
        return y

    def linear(self, name, x, n, bias=False, weight=None):
        """x W^T + b over the last axis, (rows, k) x (k, n), in the dtype of matmuls; its gradient is two such."""
        k, dtype = x.shape[-1], operation_dtype("matmul", self.config.dtype, self.device.kind)
        rows = x.numel // k
        w, b = weight or self.param(f"{name}.weight", n, k), self.param(f"{name}.bias", n) if bias else None
        if rows == 1 and self.past is not None:
            self.cast(w, dtype)  # prefill's copy, which stands beside
            dtype = operation_dtype("row product", self.config.dtype, self.device.kind)
        # autocast takes the arguments from the last to the first
        b = self.cast(b, dtype) if bias else None
        w = self.cast(w, dtype)
        x = self.cast(x, dtype)
        inputs = (x, w, b) if bias else (x, w)
        forward, to_x, to_w = (1, rows, k, n), (1, rows, n, k), (1, n, rows, k)
        matmuls = {"matmuls": [forward], "back": [to_x, to_w]}
        return self.apply(name, inputs, (*x.shape[:-1], n), dtype, (x, w), **matmuls, kind="linear")

    def norm(self, name, x):
        """Over the last axis, with a gain; LayerNorm keeps two numbers a row, RMSNorm (written out in model.py) one."""
        c = self.config
        layernorm, rows = c.norm == "layernorm", (x.numel // x.shape[-1],)
        gains = [self.param(f"{name}.weight", x.shape[-1])]
        if c.bias and layernorm:
            gains.append(self.param(f"{name}.bias", x.shape[-1]))
        extra = [Buffer(f"{name} {s}", rows, "float32") for s in (("mean", "rstd") if layernorm else ("rstd",))]
        temps = () if layernorm else [(x.shape, "float32")] * 2  # the normed input, the gradient times the gain
        return self.apply(name, (x, *gains), x.shape, "float32", (x, *gains), extra, temps=temps, kind=c.norm)

    def head_norm(self, x):
        """RMSNorm over each head, without a gain."""
        rstd = Buffer(f"{x.name} rstd", (x.numel // x.shape[-1],), "float32")
        temps = [(x.shape, "float32")] * (
            1 if x.dtype == "float32" else 2
        )  # the normed input, the result before its cast
        return self.apply(f"{x.name} normed", (x,), x.shape, "float32", (x,), (rstd,), temps=temps, kind="head norm")

    def split(self, x, shapes):
        """Return views of x; their gradients are joined in a buffer of their own."""
        views = [Buffer(name, shape, x.dtype, base=x) for name, shape in shapes.items()]
        self.emit(f"split {x.name}", (x,), views, computes=("split", (x, *views), views[0]))

        def gradient():
            joined = Buffer(f"gradient of {x.name}", x.shape, x.dtype)
            gradients = [self.gradient.pop(view) for view in views]
            self.emit(f"join gradients of {x.name}", gradients, (joined,), computes=("split", (x, *views), views[0]))
            self.arrive(x, joined)

        self.on_backward(gradient)
        return views

    def add(self, x, branch):
        """x + branch in x's dtype: its gradient is x's as it is, and the branch's after a cast, or a sum over B."""
        y = Buffer("sum", x.shape, x.dtype)
        computes = ("add", (x, branch), y)
        self.emit(f"add {branch.name}", (x, branch), (y,), computes=computes)

        def gradient():
            dy = result = self.gradient.pop(y)
            self.arrive(x, dy)
            if (branch.shape, branch.dtype) != (x.shape, x.dtype):
                result = Buffer(f"gradient of {branch.name}", branch.shape, branch.dtype)
                self.emit(result.name, (dy,), (result,), computes=computes)
            self.arrive(branch, result)

        self.on_backward(gradient)
        return y

    def dropout(self, x, p):
        """x times a mask, which is of booleans on CUDA and of x's dtype on a CPU."""
        if not p:
            return x
        mask = Buffer("dropout mask", x.shape, "bool" if self.device.kind == "cuda" else x.dtype)
        return self.apply("dropout", (x,), x.shape, x.dtype, extra=(mask,))


# --- layers, each as model.py has it


def attention(tape, x, name):
    c = tape.config
    B, T, H, K, D = c.batch_size, c.block_size, c.n_head, c.n_kv_head, c.head_dim
    qkv = tape.linear(f"{name}.qkv", x, (H + 2 * K) * D, c.bias)
    q, k, v = tape.split(qkv, {"q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, D)})
    if c.qk_norm:
        q, k = tape.head_norm(q), tape.head_norm(k)
    if c.pos == "rope":
        q, k = (tape.cast(part, "float32") for part in (q, k))
        rotate = {"saved": tape.angles, "constants": tape.angles, "kind": "rotate"}
        q, k = (tape.apply(f"{part.name} rotated", (part,), part.shape, "float32", **rotate) for part in (q, k))
    kind = attention_kind(c.dtype, tape.device.kind, tape.past is not None, c.attn_dropout)
    dtype = operation_dtype(kind, c.dtype, tape.device.kind)
    q, k, v = (tape.cast(part, dtype) for part in (q, k, v))
    if tape.past is not None:
        k, v = append_to_cache(tape, k, v)
    y = scaled_dot_product(tape, q, k, v, kind, dtype)
    return tape.linear(f"{name}.proj", y, c.n_embd, c.bias)


def append_to_cache(tape, *new):
    """Write the new keys and values behind the old ones; return all of them."""
    B, T, K, D = new[0].shape
    L, S = tape.config.n_layer, tape.past + T
    caches = [Buffer(f"{part.name} cache", (L, B, S, K, D), part.dtype, "cache") for part in new]
    pairs = list(zip(new, caches, strict=True))
    tape.emit("append to cache", new, [Buffer(f"new {p.name}", p.shape, p.dtype, base=cache) for p, cache in pairs])
    tape.caches += caches
    return [Buffer(f"{p.name} of a layer", (B, S, K, D), p.dtype, base=cache) for p, cache in pairs]


def scaled_dot_product(tape, q, k, v, kind, dtype):
    """softmax(q k^T) v: two matmuls per query head forward, four backward (of v, softmax, q, k), masked half included.

    A fused kernel keeps its inputs, its output and one number per row, and makes the T x T scores again in the
    backward; that recomputation is not counted here. attention.py keeps its inputs, by heads. With attn_dropout a CPU
    has no fused kernel: scaled copies of q and k, the softmax, the mask and their product stay.
    """
    c = tape.config
    B, T, H, D, S = c.batch_size, c.block_size, c.n_head, c.head_dim, k.shape[1]
    scores, values = (B * H, T, D, S), (B * H, T, S, D)
    both, back = [scores, values], [values, scores, values, values]
    shape = (B, T, H * D)
    if kind == "tiled attention":
        by_head = [Buffer(f"{part.name} by heads", part.shape, dtype) for part in (q, k, v)]
        scratch, temps = ([((n,), dtype)] for n in tiles_at_once(B, H, c.n_kv_head, T, D))
        of = {"extra": by_head, "matmuls": both, "back": back, "scratch": scratch, "temps": temps, "kind": kind}
        return tape.apply("attention", (q, k, v), shape, dtype, **of)
    if not (c.attn_dropout and tape.device.kind == "cpu"):
        lse = Buffer("log-sum-exp", (B, H, T), "float32")
        return tape.apply("attention", (q, k, v), shape, dtype, (q, k, v, "output"), (lse,), both, back)
    if c.n_kv_head != H:
        k, v = (tape.apply(f"{part.name} repeated", (part,), q.shape, dtype, kind="repeat") for part in (k, v))
    else:
        v = tape.apply("v by heads", (v,), v.shape, dtype)  # contiguous, for the batched matmul
    q, k = (tape.apply(f"{part.name} scaled", (part,), part.shape, dtype, kind="scale") for part in (q, k))
    weights = (B, H, T, T)
    logits = tape.apply("scores", (q, k), weights, dtype, (q, k), matmuls=[scores], back=[values, values])
    softmax = tape.apply("softmax", (logits,), weights, dtype, ("output",))
    dropped = tape.dropout(softmax, c.attn_dropout)
    y = tape.apply("weighted values", (dropped, v), (B, H, T, D), dtype, (dropped, v), matmuls=[values], back=back[:2])
    return tape.apply("join heads", (y,), shape, dtype)


def tiles_at_once(B, H, K, T, D):
    """Return how many numbers attention.py holds at most beside what goes in, comes out and is kept: forward, backward.

    Forward these are the result by heads and a tile's scores with their mask, then with what becomes of them; backward
    the gradient by heads and, of a tile, its rows of that, the weights, their gradient and that of the scores.
    """
    whole, forward, backward = B * H * T * D, 0, 0
    for heads, queries in score_tiles(B * K, H // K, T):
        t = queries.stop - queries.start
        n_rows = (heads.stop - heads.start) * (H // K) * t
        scores, mask, rows = n_rows * queries.stop, t * t, n_rows * D
        copied = rows if K < H and t < T else 0  # the rows of several heads have gaps in between
        forward = max(forward, copied + scores, scores + mask, scores + rows)
        made = max(copied + scores, scores + mask, 3 * scores)
        backward = max(backward, copied + made, scores + rows)
    return whole + forward, whole + backward


def feed_forward(tape, x, name):
    c = tape.config
    inner = (*x.shape[:-1], c.d_ff)
    if c.activation == "swiglu":
        h = tape.linear(f"{name}.up", x, 2 * c.d_ff, c.bias)
        gate, value = tape.split(h, {"gate": inner, "value": inner})
        silu = tape.apply("silu", (gate,), inner, h.dtype, (gate,))
        h = tape.apply("gated", (silu, value), inner, h.dtype, (silu, value))
    else:
        h = tape.linear(f"{name}.up", x, c.d_ff, c.bias)
        if c.activation == "gelu":
            h = tape.apply("gelu", (h,), inner, h.dtype, (h,))
        else:
            h = tape.apply("relu", (h,), inner, h.dtype, ("output",))
            h = tape.apply("square", (h,), inner, h.dtype, (h,), temps=[(inner, h.dtype)])
    return tape.linear(f"{name}.down", h, c.n_embd, c.bias)


def block(tape, x, layer, repeat=1):
    c = tape.config

    def attend(normed):
        return attention(tape, normed, f"blocks.{layer}.attn")

    def run(x):
        tape.layer, tape.repeat = layer, repeat
        if c.model == "transformer":
            tape.group = "norm"
            normed = tape.norm(f"blocks.{layer}.norm1", x)
            tape.group = "attention"
            branch = tape.recomputed(attend, normed) if recompute == "attention" else attend(normed)
            x = tape.add(x, tape.dropout(branch, c.dropout))
        tape.group = "norm"
        normed = tape.norm(f"blocks.{layer}.norm2", x)
        tape.group = "mlp"
        return tape.add(x, tape.dropout(feed_forward(tape, normed, f"blocks.{layer}.mlp"), c.dropout))

    recompute = c.recompute if tape.past is None else "none"
    tape.layer, tape.repeat = layer, repeat
    x = tape.recomputed(run, x) if recompute == "block" else run(x)
    tape.layer, tape.repeat = None, 1
    return x


def blocks(n_layer, whole):
    """Yield (block, how many it stands for). All but the first and the last are alike, so one is recorded for many.

    From one of them to the next, the bytes alive at the same operation change by the same amount: the most is alive in
    the first or in the last of them. Both stand for themselves, so that the peak is exact.
    """
    if whole or n_layer <= 5:
        return [(layer, 1) for layer in range(n_layer)]
    return [(0, 1), (1, 1), (2, n_layer - 4), (n_layer - 2, 1), (n_layer - 1, 1)]


def embedding(tape, idx):
    """Rows of the table; the table's gradient is dense. Learned positions add theirs, an MLP mixes a window of rows."""
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
    """Logits, their softmax and its gradient are (B T, V) each, the softmax in float32; or none of them exists."""
    c = tape.config
    rows, V = c.batch_size * c.block_size, c.vocab_size
    tape.group = "head"
    weight = tape.param("wte" if c.tie_weights else "head", V, c.n_embd)
    if c.loss_chunk:
        return chunked_loss(tape, tape.cast(x, operation_dtype("matmul", c.dtype, tape.device.kind)), weight, targets)
    logits = tape.linear("logits", x, V, weight=weight)
    tape.group = "loss"
    logits = tape.cast(logits, "float32")
    log_softmax = tape.apply("log-softmax", (logits,), (rows, V), "float32", ("output",))
    n_targets = Buffer("number of targets", (), "float32")
    return tape.apply("loss", (log_softmax,), (), "float32", (targets,), (n_targets,), constants=(targets,))


def chunked_loss(tape, x, weight, targets):
    """Head and loss of loss.py: chunk by chunk, with the gradients of x and of the head, which backward hands on.

    Whole chunks are alike and recorded once; a last, smaller one stands for itself.
    """
    c, micro_steps = tape.config, tape.micro_steps
    rows, C, V = c.batch_size * c.block_size, c.n_embd, c.vocab_size
    head, total = weight, Buffer("loss", (), "float32")
    if x.dtype != weight.dtype:
        head = Buffer(f"{weight.name} in {x.dtype}", weight.shape, x.dtype, "copy")
        tape.emit(head.name, (weight,), (head,), computes=("cast", (weight,), head))
    dx = Buffer("gradient of x", x.shape, x.dtype)
    dweight = Buffer(f"gradient of {weight.name}", weight.shape, "float32")
    tape.emit("zero the head's gradient", (), (dx, dweight), computes=("zero", (weight,), dweight))
    whole, rest = divmod(rows, c.loss_chunk)
    for n, times in ((c.loss_chunk, whole), (rest, min(rest, 1))):
        if not times:
            continue
        tape.micro_steps = micro_steps * times
        part, dpart = (Buffer(f"{b.name} of a chunk", (n, C), x.dtype, base=b) for b in (x, dx))
        logits = Buffer("logits of a chunk", (n, V), x.dtype)
        columns = Buffer("gradient of columns", (min(V, HEAD_COLUMNS), C), x.dtype)
        cached = min(n, max(1, CACHED_NUMBERS // V)) if tape.device.kind == "cpu" else n
        scratch = [Buffer("a few numbers a row", (cached, 4), "float32")]
        if x.dtype != "float32":  # else it takes the logits' place
            scratch.append(Buffer("softmax", (cached, V), "float32"))

        tape.group = "head"
        tape.emit("chunk's logits", (part, head), (logits,), [(1, n, C, V)], ("linear", (part, head), logits))
        tape.group = "loss"
        computes = ("chunk loss", (logits, targets), total)
        tape.emit("chunk's logits into their gradient", (logits, targets), (logits, total, *scratch), (), computes)
        tape.group = "head"
        computes = ("chunk gradient of head", (logits, part, dweight), dweight)
        tape.emit("chunk's gradient of the head", computes[1], (dweight, columns), [(1, V, n, C)], computes)
        computes = ("chunk gradient of x", (logits, head), dpart)
        tape.emit("chunk's gradient of x", (logits, head), (dpart,), [(1, n, V, C)], computes)
    tape.micro_steps = micro_steps

    def gradient():
        tape.gradient.pop(total)
        tape.emit("hand on the gradients", (dx, dweight), ())
        tape.arrive(x, dx)
        tape.arrive(weight, dweight)

    tape.on_backward(gradient)
    return total


def optimizer(tape):
    """The gradients' norm, for clipping; then AdamW: compiled in one pass, else with one tensor of the parameter's size
    beside the moments while that is updated. Gradients die at the end.
    """
    tape.group = tape.phase = "optimizer"
    states = []
    for p, grad in tape.grads.items():
        tape.repeat, norm = p.repeat, Buffer("norm", (), "float32")
        tape.emit(f"norm of gradient of {p.name}", (grad,), (norm,), computes=("gradient norm", (p,), norm))
    for p, grad in tape.grads.items():
        tape.repeat = p.repeat
        moments = [
            Buffer(f"{moment} of {p.name}", p.shape, "float32", "state", repeat=p.repeat)
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        one_pass = tape.config.compile_optimizer
        scratch = () if one_pass else (Buffer(f"update of {p.name}", p.shape, "float32"),)
        computes = ("one-pass update" if one_pass else "update", (p,), p)
        tape.emit(f"update {p.name}", (p, grad, *moments), (p, *moments, *scratch), computes=computes)
        states += moments
    tape.repeat = 1
    tape.emit("free gradients", tuple(tape.grads.values()), ())
    return states


@dataclass
class Schedule:
    """A training step. standing: what is alive before and after it; ops: what it does, in order."""

    config: object
    device: object
    ops: list[Op]
    params: dict[str, Buffer]
    standing: list[Buffer] = field(default_factory=list)


def schedule(config, device, whole=False):
    """Write down a steady step of a resolved config: micro-steps, then the update.

    All micro-steps after the first are alike, and recorded once, with how often they run; so are the inner blocks of a
    deep model, unless all of them are asked for.
    """
    tape = Tape(config, device)
    accumulation = config.gradient_accumulation_steps
    shape = (config.batch_size, config.block_size)
    idx, targets = (Buffer(name, shape, "int64", "batch") for name in ("inputs", "targets"))
    for tape.micro_steps in (1, accumulation - 1)[: min(accumulation, 2)]:
        x = embedding(tape, idx)
        for layer, repeat in blocks(config.n_layer, whole):
            x = block(tape, x, layer, repeat)
        tape.group = "norm"
        total = loss(tape, tape.norm("norm", x), targets)
        tape.emit("leave autocast", tape.copies.values(), ())  # which keeps its copies of parameters until then
        tape.copies = {}
        tape.backward(total)
    tape.micro_steps = 1
    states = optimizer(tape)
    standing = [*tape.params.values(), *states, idx, targets, *tape.angles]
    return Schedule(config, device, tape.ops, tape.params, standing)


def generation(config, device, batch_size, new, past):
    """Write down one forward of generation: `new` tokens a sequence behind `past` cached ones, the last one's logits.

    past = 0 is prefill, new = 1 decoding. Dropout is off; weights are in the dtype of matmuls already. Blocks are
    alike, and one is recorded, with how often it runs.
    """
    config = dataclasses.replace(config, batch_size=batch_size, block_size=new, dropout=0.0, attn_dropout=0.0)
    tape = Tape(config, device, past)
    idx = Buffer("inputs", (batch_size, new), "int64", "batch")
    x = embedding(tape, idx)
    x = block(tape, x, 0, config.n_layer)
    tape.group = "norm"
    x = tape.norm("norm", x)
    tape.group = "head"
    last = Buffer("last position", (batch_size, config.n_embd), "float32", base=x)
    weight = tape.param("wte" if config.tie_weights else "head", config.vocab_size, config.n_embd)
    tape.linear("logits", last, config.vocab_size, weight=weight)
    standing = [*tape.params.values(), *tape.copies.values(), *tape.caches, *tape.angles, idx]
    return Schedule(config, device, tape.ops, tape.params, standing)
