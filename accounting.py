"""The arithmetic of a run, before it runs: parameters, FLOPs, bytes over time and their peak, step time.

A training step is written down once, as the list of its operations in the order they run, each with the buffers it
reads and writes. Every figure is a fold over that list. A layer is described by the operations of its forward, in the
order model.py makes them; the tape derives the backward as autograd would. To add a layer, describe it here and write
it there: the tests hold the two together, by what torch counts, saves and allocates.

    python accounting.py configs/gpt2.py --gpu=a100-40gb
"""

import dataclasses
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, field

from config import ConfigError, command, load, require, resolve
from hardware import accelerator, local_device, operation_dtype

SIZES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}  # bytes
ASSUMED_MFU = 0.4  # of a step nobody has measured yet: what a well-kept trainer reaches on one GPU


# --- buffers, operations, and the tape that records them


@dataclass(eq=False)
class Buffer:
    """A tensor. kind: param state grad batch table copy (of a weight) activation. A view lives in its base."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "activation"
    base: "Buffer | None" = None

    @property
    def numel(self):
        return math.prod(self.shape)

    @property
    def bytes(self):
        return self.numel * SIZES[self.dtype]

    @property
    def storage(self):
        return self.base or self


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

    @property
    def flops(self):
        return sum(2 * count * m * k * n for count, m, k, n in self.matmuls)

    @property
    def touched(self):
        return {buffer.storage: None for buffer in self.reads + self.writes}  # a set that keeps its order


class Tape:
    """Record operations forward; `backward` then records their gradients in reverse, as autograd runs them.

    Autograd's rules, which decide what is alive when: an operation's gradient frees what its forward saved once all its
    outputs are made; the first gradient to reach a tensor is kept as it is, later ones are added in place; a
    parameter's gradient is complete after its last use, and is then kept, or added to the one that is there.
    """

    def __init__(self, config, device):
        self.config, self.device = config, device
        self.ops, self.undo = [], []
        self.params, self.uses = {}, Counter()
        self.gradient, self.grads = {}, {}  # on their way, by buffer; complete, by parameter
        self.group, self.phase, self.times = "", "forward", 1

    def param(self, name, *shape):
        parameter = self.params.setdefault(name, Buffer(name, shape, "float32", "param"))
        self.uses[parameter] += 1
        return parameter

    def emit(self, name, reads, writes, matmuls=()):
        self.ops.append(Op(name, self.group, self.phase, tuple(reads), tuple(writes), tuple(matmuls), self.times))

    def apply(self, name, inputs, shape, dtype, saved=(), extra=(), matmuls=(), back=(), temps=()):
        """Record an operation and return its output.

        saved: what its gradient reads, "output" standing for the output; extra: further outputs, saved as well; back:
        the matmuls of its gradient; temps: (shape, dtype) of buffers that live only while the gradient is computed.
        """
        y = Buffer(name, tuple(shape), dtype)
        saved = tuple(y if s == "output" else s for s in saved) + tuple(extra)
        self.emit(name, inputs, (y, *extra), matmuls)
        group = self.group

        def gradient():
            self.group = group
            dy = self.gradient.pop(y)
            results = [Buffer(f"gradient of {x.name}", x.shape, x.dtype) for x in inputs]
            scratch = [Buffer(f"temporary of {name}", shape, dtype) for shape, dtype in temps]
            self.emit(f"{name}: gradient", (dy, *saved), (*results, *scratch), back)
            for x, result in zip(inputs, results, strict=True):
                self.arrive(x, result)

        self.undo.append(gradient)
        return y

    def arrive(self, x, gradient):
        """Take a gradient of x that has been computed."""
        earlier = total = self.gradient.get(x)
        if earlier is None:
            total = gradient
        else:
            if x.kind == "param" and self.config.dtype == "float32":
                # a matmul's gradient of its weight is a transposed view, to which autograd does not add in place
                total = Buffer(f"gradient of {x.name}", x.shape, x.dtype)
            self.emit(f"add gradients of {x.name}", (earlier, gradient), (total,))
        self.gradient[x] = total
        if x.kind == "param":
            self.uses[x] -= 1
            if not self.uses[x]:
                complete = self.gradient.pop(x)
                if x in self.grads:
                    self.emit(f"accumulate gradient of {x.name}", (self.grads[x], complete), (self.grads[x],))
                else:
                    complete.kind = "grad"
                    self.grads[x] = complete

    def backward(self, loss):
        self.phase = "backward"
        self.gradient[loss] = Buffer("gradient of loss", loss.shape, loss.dtype)
        while self.undo:
            self.undo.pop()()
        self.phase = "forward"

    # --- operations that layers share

    def cast(self, x, dtype):
        if x.dtype == dtype:
            return x
        y = self.apply(f"{x.name} in {dtype}", (x,), x.shape, dtype)
        y.kind = "copy" if x.kind == "param" else y.kind
        return y

    def linear(self, name, x, n, bias=False, weight=None):
        """x W^T + b over the last axis, (rows, k) x (k, n), in the dtype of matmuls; its gradient is two such."""
        k, dtype = x.shape[-1], operation_dtype("matmul", self.config.dtype, self.device.kind)
        rows = x.numel // k
        x, w = self.cast(x, dtype), self.cast(weight or self.param(f"{name}.weight", n, k), dtype)
        inputs = (x, w, self.cast(self.param(f"{name}.bias", n), dtype)) if bias else (x, w)
        forward, to_x, to_w = (1, rows, k, n), (1, rows, n, k), (1, n, rows, k)
        return self.apply(name, inputs, (*x.shape[:-1], n), dtype, (x, w), matmuls=[forward], back=[to_x, to_w])

    def norm(self, name, x):
        """Over the last axis, with a gain; LayerNorm keeps two numbers a row, RMSNorm (written out in model.py) one."""
        c = self.config
        layernorm, rows = c.norm == "layernorm", (x.numel // x.shape[-1],)
        gains = [self.param(f"{name}.weight", x.shape[-1])]
        if c.bias and layernorm:
            gains.append(self.param(f"{name}.bias", x.shape[-1]))
        extra = [Buffer(f"{name} {s}", rows, "float32") for s in (("mean", "rstd") if layernorm else ("rstd",))]
        temps = () if layernorm else [(x.shape, "float32")] * 2  # the normed input, the gradient times the gain
        return self.apply(name, (x, *gains), x.shape, "float32", (x, *gains), extra, temps=temps)

    def head_norm(self, x):
        """RMSNorm over each head, without a gain."""
        rstd = Buffer(f"{x.name} rstd", (x.numel // x.shape[-1],), "float32")
        temps = [(x.shape, "float32")] * (
            1 if x.dtype == "float32" else 2
        )  # the normed input, the result before its cast
        return self.apply(f"{x.name} normed", (x,), x.shape, "float32", (x,), (rstd,), temps=temps)

    def split(self, x, shapes):
        """Return views of x; their gradients are joined in a buffer of their own."""
        views = [Buffer(name, shape, x.dtype, base=x) for name, shape in shapes.items()]

        def gradient():
            joined = Buffer(f"gradient of {x.name}", x.shape, x.dtype)
            self.emit(f"join gradients of {x.name}", [self.gradient.pop(view) for view in views], (joined,))
            self.arrive(x, joined)

        self.undo.append(gradient)
        return views

    def add(self, x, branch):
        """x + branch in x's dtype: its gradient is x's as it is, and the branch's after a cast, or a sum over B."""
        y = Buffer("sum", x.shape, x.dtype)
        self.emit(f"add {branch.name}", (x, branch), (y,))

        def gradient():
            dy = result = self.gradient.pop(y)
            self.arrive(x, dy)
            if (branch.shape, branch.dtype) != (x.shape, x.dtype):
                result = Buffer(f"gradient of {branch.name}", branch.shape, branch.dtype)
                self.emit(result.name, (dy,), (result,))
            self.arrive(branch, result)

        self.undo.append(gradient)
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
        q, k = (tape.apply(f"{part.name} rotated", (part,), part.shape, "float32") for part in (q, k))
    dtype = operation_dtype("attention", c.dtype, tape.device.kind)
    q, k, v = (tape.cast(part, dtype) for part in (q, k, v))
    y = scaled_dot_product(tape, q, k, v, dtype)
    return tape.linear(f"{name}.proj", y, c.n_embd, c.bias)


def scaled_dot_product(tape, q, k, v, dtype):
    """softmax(q k^T) v: two matmuls per query head forward, four backward (of v, softmax, q, k), masked half included.

    A fused kernel keeps its inputs, its output and one number per row, and makes the T x T scores again in the
    backward; that recomputation is not counted here. With attn_dropout a CPU has no fused kernel: scaled copies of q
    and k, the softmax, the mask and their product stay.
    """
    c = tape.config
    B, T, H, D = c.batch_size, c.block_size, c.n_head, c.head_dim
    scores, values = (B * H, T, D, T), (B * H, T, T, D)
    both, back = [scores, values], [values, scores, values, values]
    shape = (B, T, H * D)
    if not (c.attn_dropout and tape.device.kind == "cpu"):
        lse = Buffer("log-sum-exp", (B, H, T), "float32")
        return tape.apply("attention", (q, k, v), shape, dtype, (q, k, v, "output"), (lse,), both, back)
    if c.n_kv_head != H:
        k, v = (tape.apply(f"{part.name} repeated", (part,), q.shape, dtype) for part in (k, v))
    else:
        v = tape.apply("v by heads", (v,), v.shape, dtype)  # contiguous, for the batched matmul
    q, k = (tape.apply(f"{part.name} scaled", (part,), part.shape, dtype) for part in (q, k))
    weights = (B, H, T, T)
    logits = tape.apply("scores", (q, k), weights, dtype, (q, k), matmuls=[scores], back=[values, values])
    softmax = tape.apply("softmax", (logits,), weights, dtype, ("output",))
    dropped = tape.dropout(softmax, c.attn_dropout)
    y = tape.apply("weighted values", (dropped, v), (B, H, T, D), dtype, (dropped, v), matmuls=[values], back=back[:2])
    return tape.apply("join heads", (y,), shape, dtype)


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


def block(tape, x, layer):
    c = tape.config
    if c.model == "transformer":
        tape.group = "norm"
        normed = tape.norm(f"blocks.{layer}.norm1", x)
        tape.group = "attention"
        x = tape.add(x, tape.dropout(attention(tape, normed, f"blocks.{layer}.attn"), c.dropout))
    tape.group = "norm"
    normed = tape.norm(f"blocks.{layer}.norm2", x)
    tape.group = "mlp"
    return tape.add(x, tape.dropout(feed_forward(tape, normed, f"blocks.{layer}.mlp"), c.dropout))


def embedding(tape, idx):
    """Rows of the table; the table's gradient is dense. Learned positions add theirs, an MLP mixes a window of rows."""
    c = tape.config
    B, T, C, m = c.batch_size, c.block_size, c.n_embd, c.mlp_context
    tape.group = "embedding"
    x = tape.apply("embedding", (tape.param("wte", c.vocab_size, C),), (B, T, C), "float32", (idx,))
    if c.model == "mlp":
        x = tape.apply("padded", (x,), (B, T + m - 1, C), "float32")
        x = tape.apply("windows", (x,), (B, T, m * C), "float32")
        x = tape.cast(tape.linear("mix", x, C, c.bias), "float32")
    elif c.pos == "learned":
        x = tape.add(x, tape.param("wpe", T, C))
    return tape.dropout(x, c.dropout)


def loss(tape, x, targets):
    """Logits, their softmax and its gradient are (B T, V) each, the softmax in float32."""
    c = tape.config
    rows, V = c.batch_size * c.block_size, c.vocab_size
    tape.group = "head"
    weight = tape.param("wte" if c.tie_weights else "head", V, c.n_embd)
    logits = tape.linear("logits", x, V, weight=weight)
    tape.group = "loss"
    logits = tape.cast(logits, "float32")
    log_softmax = tape.apply("log-softmax", (logits,), (rows, V), "float32", ("output",))
    return tape.apply("loss", (log_softmax,), (), "float32", (targets,), (Buffer("number of targets", (), "float32"),))


def optimizer(tape):
    """AdamW: one tensor of the parameter's size beside the moments while it is updated; gradients die at the end."""
    tape.group = tape.phase = "optimizer"
    states = []
    for p, grad in tape.grads.items():
        moments = [Buffer(f"{moment} of {p.name}", p.shape, "float32", "state") for moment in ("exp_avg", "exp_avg_sq")]
        scratch = Buffer(f"update of {p.name}", p.shape, "float32")
        tape.emit(f"update {p.name}", (p, grad, *moments), (p, *moments, scratch))
        states += moments
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


def schedule(config, device):
    """Write down a steady step of a resolved config: micro-steps, then the update.

    All micro-steps after the first are alike, and recorded once, with how often they run.
    """
    tape = Tape(config, device)
    accumulation = config.gradient_accumulation_steps
    shape = (config.batch_size, config.block_size)
    idx, targets = (Buffer(name, shape, "int64", "batch") for name in ("inputs", "targets"))
    for tape.times in (1, accumulation - 1)[: min(accumulation, 2)]:
        x = embedding(tape, idx)
        for layer in range(config.n_layer):
            x = block(tape, x, layer)
        tape.group = "norm"
        tape.backward(loss(tape, tape.norm("norm", x), targets))
    tape.times = 1
    states = optimizer(tape)
    standing = [*tape.params.values(), *states, idx, targets]
    if config.model == "transformer" and config.pos == "rope":
        table = (config.block_size, config.head_dim // 2)
        standing += [Buffer(name, table, "float32", "table") for name in ("cos", "sin")]
    return Schedule(config, device, tape.ops, tape.params, standing)


# --- folds


@dataclass
class Timeline:
    """Bytes alive during each operation. A buffer is alive from the first operation that touches it to the last."""

    schedule: Schedule

    def __post_init__(self):
        s = self.schedule
        standing = set(s.standing)
        self.first, self.last = {}, {}
        for i, op in enumerate(s.ops):
            for buffer in op.touched:
                if buffer not in standing:
                    self.first.setdefault(buffer, i)
                    self.last[buffer] = i
        change = [0] * (len(s.ops) + 1)
        for buffer, i in self.first.items():
            change[i] += buffer.bytes
            change[self.last[buffer] + 1] -= buffer.bytes
        self.standing_bytes = sum(buffer.bytes for buffer in s.standing)
        self.live, now = [], self.standing_bytes
        for delta in change[:-1]:
            now += delta
            self.live.append(now)
        self.peak = max(self.live)
        self.peak_op = s.ops[self.live.index(self.peak)]

    def alive(self, op):
        """Return the buffers alive during an operation, what stands through the whole step first."""
        i = self.schedule.ops.index(op)
        return self.schedule.standing + [b for b, first in self.first.items() if first <= i <= self.last[b]]

    def category(self, buffer):
        """Return the line of the report that a buffer belongs to."""
        if buffer.kind in CATEGORIES:
            return CATEGORIES[buffer.kind]
        born = self.schedule.ops[self.first[buffer]]
        if born.group in ("head", "loss"):
            return "logits and loss"
        return "saved activations" if born.phase == "forward" else "gradients of activations"

    def saved(self):
        """Return the buffers that a forward makes and its backward reads, of one micro-step."""
        ops = self.schedule.ops
        start = next(i for i, op in enumerate(ops) if op.phase == "backward")
        return [b for b, first in self.first.items() if first < start <= self.last[b] and b.kind != "grad"]


CATEGORIES = {
    "param": "parameters",
    "grad": "gradients",
    "state": "optimizer state",
    "copy": "weight copies",
    "batch": "batch",
    "table": "rotation tables",
}


def predict(config, device, memory_bytes=None, mfu=ASSUMED_MFU):
    """Return all figures of a run as a nested dict: counts, FLOPs and bytes are integers, times seconds or None."""
    s = schedule(config, device)
    t = Timeline(s)
    by_category = Counter()
    for buffer in t.alive(t.peak_op):
        by_category[t.category(buffer)] += buffer.bytes
    saved = Counter()
    for buffer in t.saved():
        saved[t.category(buffer)] += buffer.bytes
    loss_bytes = max(
        sum(b.bytes for b in t.alive(op) if t.category(b) == "logits and loss") for op in s.ops if op.group == "loss"
    )
    n_params = sum(p.numel for p in s.params.values())
    matmul_weights = [name for name, p in s.params.items() if len(p.shape) == 2 and name not in ("wte", "wpe")]
    n_matmul = (
        sum(s.params[name].numel for name in matmul_weights) + (config.vocab_size * config.n_embd) * config.tie_weights
    )
    per_step = sum(op.flops * op.times for op in s.ops)
    forward = sum(op.flops * op.times for op in s.ops if op.phase == "forward")
    available = memory_bytes or device.memory_bytes
    peak = device.peak(config.dtype)
    step_s = per_step / (peak * mfu) if peak else None
    tokens = config.tokens_per_step
    return {
        "model": {"params": n_params, "params_matmul": n_matmul},
        "flops": {
            "six_nd_per_token": 6 * n_params,
            "forward_per_token": forward // tokens,
            "per_token": per_step // tokens,
            "per_step": per_step,
        },
        "memory": {
            "params": sum(p.bytes for p in s.params.values()),
            "gradients": sum(p.bytes for p in s.params.values()),
            "optimizer": sum(b.bytes for b in s.standing if b.kind == "state"),
            "activations": saved["saved activations"],
            "weight_copies": saved["weight copies"],
            "loss": loss_bytes,
            "batch": sum(b.bytes for b in s.standing if b.kind == "batch"),
            "peak": t.peak,
            "peak_at": f"{t.peak_op.phase}, {t.peak_op.name}",
            "at_peak": dict(by_category),
            "available": available,
        },
        "time": {
            "mfu": mfu,
            "peak_flops": peak,
            "peak_source": device.source,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s if step_s else None,
            "total_s": step_s * config.max_iters if step_s else None,
        },
        "fits": t.peak <= available if available else None,
    }


def largest_batch(config, device, memory_bytes):
    """Return the largest batch_size that fits into memory_bytes; 0 where not even 1 does."""

    def fits(batch_size):
        s = schedule(dataclasses.replace(config, batch_size=batch_size), device)
        return Timeline(s).peak <= memory_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def refuse_what_cannot_fit(config, device, prediction):
    """Raise ConfigError with the largest batch_size that fits, or with the news that none does."""
    peak, available = prediction["memory"]["peak"], prediction["memory"]["available"]
    if prediction["fits"] is not False:
        return
    largest = largest_batch(config, device, available)
    standing = sum(prediction["memory"][key] for key in ("params", "gradients", "optimizer"))
    if largest:
        total = config.batch_size * config.gradient_accumulation_steps
        way_out = (
            f"--batch_size={largest} is the largest that fits; --gradient_accumulation_steps={-(-total // largest)} "
            f"with it keeps about {config.tokens_per_step:,} tokens a step"
        )
    elif standing > available:
        way_out = f"batch size cannot help: parameters, gradients and optimizer state alone need {mib(standing)}"
    else:
        way_out = "not even --batch_size=1 fits; a shorter --block_size or a smaller model would"
    raise ConfigError(
        f"batch_size={config.batch_size} needs {mib(peak)} at its peak ({prediction['memory']['peak_at']}), "
        f"but {device.name} has {mib(available)}; {way_out}"
    )


# --- the report


def mib(n):
    return f"{n / 2**20:,.1f} MiB" if n < 2**30 else f"{n / 2**30:,.2f} GiB"


def si(n, unit=""):
    """Return a number in three digits with its SI prefix and unit, such as 874 GFLOP."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(n) >= 10**power:
            return f"{n / 10**power:.3g} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def duration(seconds):
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def report(config, device, prediction):
    """Yield the prediction as the lines that accounting.py and train.py print."""
    c, (model, flops, memory, time) = config, (prediction[key] for key in ("model", "flops", "memory", "time"))
    shape = f"{c.n_layer} layers, width {c.n_embd}"
    if c.model == "transformer":
        groups = f" ({c.n_kv_head} key-value)" if c.n_kv_head != c.n_head else ""
        shape += f", {c.n_head} heads of {c.head_dim}{groups}"
    ceiling = (
        f"peak {si(time['peak_flops'], 'FLOP/s')} ({time['peak_source']})" if time["peak_flops"] else "peak unknown"
    )
    yield f"device      {device.name}: {c.dtype} matmuls, {ceiling}"
    yield f"model       {c.model}, {shape}, context {c.block_size}, vocabulary {c.vocab_size:,}"
    yield f"parameters  {model['params']:,}, of which {model['params_matmul']:,} multiply every token"
    yield (
        f"batch       {c.batch_size} sequences x {c.block_size} tokens x {c.gradient_accumulation_steps} micro-steps "
        f"= {c.tokens_per_step:,} tokens a step"
    )
    yield f"run         {c.max_iters:,} steps, {si(c.tokens_per_step * c.max_iters)} tokens"
    ratio = flops["per_token"] / flops["six_nd_per_token"]
    yield (
        f"FLOPs       {si(flops['per_step'], 'FLOP')} a step; {si(flops['per_token'], 'FLOP')} a token, forward and "
        f"backward, {ratio:.2f} x 6N"
    )
    yield "            (all matmuls, attention in full as PaLM counts it; N: all parameters)"
    rows = [
        ("parameters", memory["params"], "float32"),
        ("gradients", memory["gradients"], "float32, complete at the end of backward"),
        ("optimizer state", memory["optimizer"], "two float32 moments"),
        ("activations", memory["activations"], "what forward keeps for backward, besides what follows"),
        ("weight copies", memory["weight_copies"], f"in {c.dtype}, kept by autocast from forward to backward"),
        ("logits and loss", memory["loss"], "the most that is alive of them at once"),
    ]
    yield "memory      never all alive at once: the peak is not the sum"
    yield from (f"  {name:<17}{mib(n):>12}  {note}" for name, n, note in rows if n)
    room = f" of {mib(memory['available'])} available" if memory["available"] else ""
    yield f"  {'peak':<17}{mib(memory['peak']):>12}{room}, in {memory['peak_at']}; alive then:"
    alive = sorted(memory["at_peak"].items(), key=lambda item: -item[1])
    yield from (f"    {name:<25}{mib(n):>12}" for name, n in alive if n >= 0.005 * memory["peak"])
    if time["step_s"]:
        yield (
            f"time        {duration(time['step_s'])} a step, {time['tokens_per_s']:,.0f} tokens/s, "
            f"{duration(time['total_s'])} in all, at an assumed {time['mfu']:.0%} of the peak (--mfu)"
        )
    else:
        yield "time        unknown without the device's peak: name a card with --gpu, or train here once to measure it"


# --- the command line


@dataclass(frozen=True)
class Options:
    """Predict what a run will take, without running it: parameters, FLOPs, memory and its peak, time."""

    gpu: str | None = None  # a card of the table, such as h100-sxm; None: this machine
    memory: str | None = None  # what may be used, such as 39.5GiB; None: what the device has
    mfu: float = ASSUMED_MFU  # fraction of the peak that the step is assumed to reach
    json: bool = False  # print everything as JSON, for programs


def parse_memory(text):
    """Return bytes from a size with a unit, or None from None."""
    if text is None:
        return None
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("GB", 10**9), ("MB", 10**6)):
        if text.endswith(unit):
            try:
                n_bytes = float(text.removesuffix(unit)) * size
            except ValueError:
                break
            if 0 < n_bytes < math.inf:
                return int(n_bytes)
    raise ConfigError(f"--memory={text}: expects a size with its unit, such as 39.5GiB or 40GB")


@command
def main(argv):
    config, options = load(argv, Options)
    require(0 < options.mfu <= 1, f"--mfu={options.mfu} must lie in (0, 1]")
    device = accelerator(options.gpu) if options.gpu else local_device(config.device)
    config = resolve(config, device)
    prediction = predict(config, device, parse_memory(options.memory), options.mfu)
    if options.json:
        print(json.dumps(prediction, indent=2))
        return 0
    for line in report(config, device, prediction):
        print(line)
    if prediction["fits"] is False:
        refuse_what_cannot_fit(config, device, prediction)
    return 0


if __name__ == "__main__":
    sys.exit(main())
