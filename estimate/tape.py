"""The operations of a step, the buffers that each one reads and writes, and the tape that records them.

The functions of layers.py record the operations of a layer's forward pass. From these, the tape derives the operations
of the backward pass as autograd would."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ops.choices import operation_dtype

RANDOM_STATE_BYTES = 5056  # the state of torch's random generator on a CPU
MAX_CACHED_BYTES = 2**24  # a larger buffer has left a CPU's cache before the next operation reads it
SIZES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}  # bytes per element


@dataclass(eq=False)
class Buffer:
    """A tensor. If it is a view, it uses the memory of its base."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "activation"  # or param, grad, state, batch, table, cache, or copy (a weight in another dtype)
    base: "Buffer | None" = None
    repeat: int = 1  # how many blocks have such a buffer; only of persistent buffers
    transposed: bool = False  # a weight's gradient, as a matmul returns it: autograd cannot add to it in place

    def __post_init__(self):
        self.numel = math.prod(self.shape)
        self.bytes = self.numel * SIZES[self.dtype]
        self.storage = self.base or self


@dataclass(eq=False)
class Op:
    """One operation of a step."""

    name: str
    group: str  # embedding attention mlp norm head loss optimizer
    phase: str  # forward backward optimizer
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    matmuls: tuple[tuple[int, int, int, int], ...] = ()  # (count, m, k, n): 2 count m k n FLOPs
    times: int = 1  # how often a step executes it
    layer: int | None = None  # the index of its block
    repeat: int = 1  # how many blocks it stands for: its own and those that follow
    kind: str = ""  # what is computed; an operation and its gradient have the same kind, inputs and output
    inputs: tuple[Buffer, ...] = ()
    output: Buffer | None = None
    recomputed: bool = False  # whether backward executes it a second time because its result was not saved

    @property
    def flops(self):
        return sum(2 * count * m * k * n for count, m, k, n in self.matmuls)

    @property
    def is_attention(self):
        """Whether its matmuls are those of attention's scores and values, over all pairs of positions."""
        return self.kind in ("attention", "tiled attention", "scores", "weighted values")

    @property
    def is_gradient(self):
        return self.phase == "backward" and not self.recomputed

    @property
    def bytes(self):
        """The bytes moved if each buffer is read or written once, the least that any kernel can move.

        An operation that only makes views, or only frees buffers, moves none.
        """
        read = {buffer.storage for buffer in self.reads}
        if all(buffer.base and buffer.storage in read for buffer in self.writes):
            return 0
        return sum(buffer.bytes for buffer in (*self.reads, *self.writes))

    @property
    def cached_bytes(self):
        """The bytes of the buffers that may still be in a CPU's cache when the next operation reads them."""
        buffers = (*self.reads, *self.writes)
        return sum(buffer.bytes for buffer in buffers if self.bytes and buffer.bytes <= MAX_CACHED_BYTES)

    def least_seconds(self, peak, bandwidth):
        """Return the least time of one execution: it is bounded by peak (FLOP/s) and by bandwidth (bytes/s)."""
        return max(self.flops / peak, self.bytes / bandwidth)

    @property
    def label(self):
        """The name without the number of the block, so that it is the same in every block."""
        return re.sub(r"blocks\.\d+\.", "", self.name).replace(": gradient", " gradient")

    @property
    def key(self):
        """(what is computed, on which shapes), as text. Operations with the same key take the same time."""
        buffers = (*self.inputs, self.output)
        dtypes, shapes = [b.dtype for b in buffers], ["x".join(map(str, b.shape)) or "1" for b in buffers]
        kind = f"{self.kind} gradient" if self.is_gradient else self.kind
        return f"{kind}: {', '.join(dtypes[:-1])} -> {dtypes[-1]}", f"{', '.join(shapes[:-1])} -> {shapes[-1]}"

    @property
    def storages(self):
        """The storages that it reads or writes, each one once and in order: the keys of a dict."""
        return dict.fromkeys(buffer.storage for buffer in self.reads + self.writes)


class BackwardRule(NamedTuple):
    """What the backward pass does about one operation of the forward pass."""

    record_gradient: Callable[[], None]
    group: str
    layer: int | None
    repeat: int
    saving_op: Op | None  # the forward operation, if it saves tensors for backward


class Tape:
    """Records the operations of the forward pass; backward() then records their gradients in reverse order.

    The tape follows the rules by which autograd decides which tensors are alive:
    - What an operation saved for backward is freed as soon as its gradient has been computed.
    - The first gradient that reaches a tensor is kept as it is. Later ones are added to it in place.
    - The gradient of a parameter is complete after the parameter's last use. It is then kept, or added to the gradient
      of the earlier micro-steps.
    """

    def __init__(self, config, spec, past=None):
        self.config, self.spec = config, spec
        self.past = past  # how many positions the key-value cache holds; None in training, where there is no cache
        # These describe the operation that is recorded next.
        self.group, self.phase, self.layer = "", "forward", None
        self.micro_steps, self.repeat = 1, 1  # how many micro-steps and how many blocks it stands for
        self.is_recomputing = False
        # These are what has been recorded.
        self.ops, self.backward_rules = [], []
        self.params, self.caches, self.weight_copies, self.rope_tables = {}, [], {}, ()
        if config.model == "transformer" and config.pos == "rope":
            table = (config.block_size, 1, config.head_dim // 2)
            self.rope_tables = tuple(Buffer(name, table, "float32", "table") for name in ("cos", "sin"))
        self.uses_left = Counter()  # parameter -> how many of its gradients backward has not yet computed
        self.gradients, self.param_gradients = {}, {}  # buffer -> unfinished gradient, parameter -> complete gradient

    # --- forward

    def param(self, name, *shape):
        parameter = self.params.setdefault(name, Buffer(name, shape, "float32", "param", repeat=self.repeat))
        self.uses_left[parameter] += 1
        return parameter

    def record(self, name, reads, writes, matmuls=(), kind="", inputs=(), output=None):
        """Append an operation to the tape. If it has no kind, predicted times leave it out."""
        times = self.micro_steps * self.repeat
        name = f"{name}, again" if self.is_recomputing else name
        where = {"group": self.group, "phase": self.phase, "layer": self.layer, "repeat": self.repeat}
        what = {"kind": kind, "inputs": inputs, "output": output, "recomputed": self.is_recomputing}
        self.ops.append(
            Op(name, reads=tuple(reads), writes=tuple(writes), matmuls=tuple(matmuls), times=times, **where, **what)
        )

    def apply(
        self, name, inputs, shape, dtype, saved=(), saved_outputs=(), matmuls=(), backward_matmuls=(), scratch=(),
        backward_scratch=(), kind=None, constants=(),
    ):  # fmt: skip
        """Record an operation and, for the backward pass, its gradient. Return its output.

        saved: the buffers that its gradient reads, where "output" stands for the output
        saved_outputs: further outputs, which its gradient reads too
        constants: further inputs, which have no gradient
        scratch, backward_scratch: (shape, dtype) of each buffer that lives only during the operation or its gradient
        kind: what is computed, if the name does not say it
        """
        y = Buffer(name, tuple(shape), dtype)
        saved = (*(y if buffer == "output" else buffer for buffer in saved), *saved_outputs)
        computes = {"kind": kind or name, "inputs": (*inputs, *constants), "output": y}
        scratch = [Buffer(f"temporary of {name}", *form) for form in scratch]
        self.record(name, computes["inputs"], (y, *saved_outputs, *scratch), matmuls, **computes)

        def record_gradient():
            dy = self.gradients.pop(y)
            results = [Buffer(f"gradient of {x.name}", x.shape, x.dtype) for x in inputs]
            if kind == "linear":
                results[1].transposed = True
            scratch = [Buffer(f"temporary of {name}", *form) for form in backward_scratch]
            self.record(f"{name}: gradient", (dy, *saved), (*results, *scratch), backward_matmuls, **computes)
            for x, result in zip(inputs, results, strict=True):
                self.add_gradient(x, result)

        self.on_backward(record_gradient, saves=bool(saved))
        return y

    # --- backward

    def on_backward(self, record_gradient, saves=False):
        """Make the backward pass call record_gradient() for the operation that was recorded last."""
        saving_op = self.ops[-1] if saves else None
        self.backward_rules.append(BackwardRule(record_gradient, self.group, self.layer, self.repeat, saving_op))

    def backward(self, loss):
        """Record the backward pass of everything on the tape."""
        self.phase = "backward"
        self.gradients[loss] = Buffer("gradient of loss", loss.shape, loss.dtype)
        while self.backward_rules:
            self.follow(self.backward_rules.pop())
        self.phase, self.layer, self.repeat = "forward", None, 1

    def follow(self, rule):
        self.group, self.layer, self.repeat = rule.group, rule.layer, rule.repeat
        rule.record_gradient()

    def add_gradient(self, x, gradient):
        """Add a gradient of x to the earlier ones. The gradient of a parameter is complete after its last use."""
        total = gradient
        if earlier := self.gradients.get(x):
            total = Buffer(f"gradient of {x.name}", x.shape, x.dtype) if earlier.transposed else earlier
            self.record_sum(f"add gradients of {x.name}", earlier, gradient, total)
        self.gradients[x] = total
        if x.kind == "param":
            self.uses_left[x] -= 1
            if not self.uses_left[x]:
                self.keep_gradient(x, self.gradients.pop(x))

    def keep_gradient(self, parameter, gradient):
        """Keep the complete gradient of a parameter, or add it to that of the earlier micro-steps."""
        if parameter in self.param_gradients:
            total = self.param_gradients[parameter]
            self.record_sum(f"accumulate gradient of {parameter.name}", total, gradient, total)
        else:
            gradient.kind = "grad"
            self.param_gradients[parameter] = gradient

    def record_sum(self, name, a, b, total):
        self.record(name, (a, b), (total,), kind="add gradients", inputs=(a, b), output=total)

    # --- recomputation in backward

    def recompute(self, run, x):
        """Record run(x) as torch.utils.checkpoint executes it: only x is saved, and backward executes run(x) again.

        The second execution starts when a gradient first needs a saved tensor. It ends before the last operation that
        saves tensors, because that operation saves its inputs.
        """
        n_rules, uses_left = len(self.backward_rules), self.uses_left.copy()
        saved_state = self.save_random_state()
        y = run(x)
        # The second execution adds these rules and counts these uses again.
        del self.backward_rules[n_rules:]
        self.uses_left = uses_left

        def record_gradient():
            ops_again, rules = self.execute_again(run, x, y, saved_state)
            for rule in reversed(rules):
                if rule.saving_op:
                    self.ops += ops_again
                    ops_again = []
                self.follow(rule)
            self.record("free what recomputation kept", (x, *saved_state), ())

        self.on_backward(record_gradient)
        return y

    def save_random_state(self):
        """Record that torch saves a CPU's random state, so that the second execution draws the same dropout masks.

        Return the saved state in a tuple, which is empty if nothing was saved.
        """
        has_dropout = self.config.dropout or self.config.attn_dropout
        if not has_dropout or self.spec.kind != "cpu":
            return ()
        state = Buffer("state of the random generator", (RANDOM_STATE_BYTES,), "bool")
        self.record("save the random state", (), (state,))
        return (state,)

    def execute_again(self, run, x, y, saved_state):
        """Return (operations, backward rules) of the second execution of run(x), and give its output the gradient of y.

        The tape is as it was before: the caller decides when the operations are executed.
        """
        n_rules, ops_before, copies_before = len(self.backward_rules), self.ops, self.weight_copies
        self.ops, self.weight_copies, self.is_recomputing = [], {}, True
        dy = self.gradients.pop(y)
        self.gradients[run(x)] = dy
        rules = self.backward_rules[n_rules:]
        del self.backward_rules[n_rules:]
        last = next(rule.saving_op for rule in reversed(rules) if rule.saving_op)
        needed = self.ops[: self.ops.index(last)]
        if last.kind == "dropout":  # it saves its mask, which is made before its output
            needed.append(dataclasses.replace(last, writes=last.writes[1:]))

        self.ops = []
        state_before = tuple(dataclasses.replace(state) for state in saved_state)  # torch puts it back at the end
        self.record("restore the random state", saved_state, state_before)
        self.ops += needed
        self.record("leave autocast", (*self.weight_copies.values(), *state_before), ())
        ops_again = self.ops
        self.ops, self.weight_copies, self.is_recomputing = ops_before, copies_before, False
        return ops_again, rules

    # --- operations that several layers use

    def cast(self, x, dtype):
        """Convert x to a dtype. Copies of parameters are kept until autocast ends; in generation, for all tokens."""
        if x.dtype == dtype:
            return x
        if x.kind == "param" and self.past is not None:
            return self.weight_copies.setdefault(x, Buffer(f"{x.name} in {dtype}", x.shape, dtype, "copy"))
        y = self.apply(f"{x.name} in {dtype}", (x,), x.shape, dtype, kind="cast")
        if x.kind == "param":
            y.kind = "copy"
            self.weight_copies[x] = y
        return y

    def linear(self, name, x, n, bias=False, weight=None):
        """x W^T + b over the last axis, in the dtype of matmuls. Its gradient is one matmul for x and one for W."""
        k, dtype = x.shape[-1], operation_dtype("matmul", self.config.dtype, self.spec.kind)
        rows = x.numel // k
        w, b = weight or self.param(f"{name}.weight", n, k), self.param(f"{name}.bias", n) if bias else None
        if rows == 1 and self.past is not None:
            self.cast(w, dtype)  # the copy that prefill made stays in memory
            dtype = operation_dtype("row product", self.config.dtype, self.spec.kind)
        # Autocast converts the last argument first.
        b = self.cast(b, dtype) if bias else None
        w = self.cast(w, dtype)
        x = self.cast(x, dtype)
        inputs = (x, w, b) if bias else (x, w)
        forward, for_x, for_w = (1, rows, k, n), (1, rows, n, k), (1, n, rows, k)
        matmuls = {"matmuls": [forward], "backward_matmuls": [for_x, for_w]}
        return self.apply(name, inputs, (*x.shape[:-1], n), dtype, (x, w), **matmuls, kind="linear")

    def norm(self, name, x):
        """Normalise over the last axis and multiply by a gain. LayerNorm saves two numbers per row, RMSNorm one."""
        c = self.config
        layernorm, rows = c.norm == "layernorm", (x.numel // x.shape[-1],)
        gains = [self.param(f"{name}.weight", x.shape[-1])]
        if c.bias and layernorm:
            gains.append(self.param(f"{name}.bias", x.shape[-1]))
        statistics = [Buffer(f"{name} {s}", rows, "float32") for s in (("mean", "rstd") if layernorm else ("rstd",))]
        # The backward of ops/rms_norm.py makes the normalised input, and the gradient times the gain.
        scratch = () if layernorm else [(x.shape, "float32")] * 2
        return self.apply(
            name, (x, *gains), x.shape, "float32", (x, *gains), statistics, backward_scratch=scratch, kind=c.norm
        )

    def head_norm(self, x):
        """RMSNorm over each head, without a gain."""
        rstd = Buffer(f"{x.name} rstd", (x.numel // x.shape[-1],), "float32")
        # Its backward makes the normalised input and, if x is not float32, the result before the cast.
        scratch = [(x.shape, "float32")] * (1 if x.dtype == "float32" else 2)
        name, kind = f"{x.name} normed", "head norm"
        return self.apply(name, (x,), x.shape, "float32", (x,), (rstd,), backward_scratch=scratch, kind=kind)

    def split(self, x, shapes):
        """Return views of x, one for each of {name: shape}. Backward joins their gradients in a new buffer."""
        views = [Buffer(name, shape, x.dtype, base=x) for name, shape in shapes.items()]
        computes = {"kind": "split", "inputs": (x, *views), "output": views[0]}
        self.record(f"split {x.name}", (x,), views, **computes)

        def record_gradient():
            joined = Buffer(f"gradient of {x.name}", x.shape, x.dtype)
            gradients = [self.gradients.pop(view) for view in views]
            self.record(f"join gradients of {x.name}", gradients, (joined,), **computes)
            self.add_gradient(x, joined)

        self.on_backward(record_gradient)
        return views

    def add(self, x, branch):
        """x + branch in the dtype of x.

        The gradient of x is that of the sum. So is the branch's, unless it has another dtype or is summed over B.
        """
        y = Buffer("sum", x.shape, x.dtype)
        computes = {"kind": "add", "inputs": (x, branch), "output": y}
        self.record(f"add {branch.name}", (x, branch), (y,), **computes)

        def record_gradient():
            dy = dbranch = self.gradients.pop(y)
            self.add_gradient(x, dy)
            if (branch.shape, branch.dtype) != (x.shape, x.dtype):
                dbranch = Buffer(f"gradient of {branch.name}", branch.shape, branch.dtype)
                self.record(dbranch.name, (dy,), (dbranch,), **computes)
            self.add_gradient(branch, dbranch)

        self.on_backward(record_gradient)
        return y

    def dropout(self, x, p):
        """x times a mask. The mask is boolean on CUDA, and has the dtype of x on a CPU."""
        if not p:
            return x
        mask = Buffer("dropout mask", x.shape, "bool" if self.spec.kind == "cuda" else x.dtype)
        return self.apply("dropout", (x,), x.shape, x.dtype, saved_outputs=(mask,), kind="dropout")
