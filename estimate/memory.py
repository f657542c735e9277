"""Memory over a step: which buffers are alive during each operation, the peak, and what is alive at the peak."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from estimate.step import Step
from estimate.tape import SIZES, Buffer
from hardware.spec import CUDA_CONTEXT_BYTES
from ops.choices import operation_dtype

CATEGORIES = {  # kind of a buffer -> its line in the report
    "param": "parameters",
    "grad": "gradients",
    "state": "optimizer state",
    "copy": "weight copies",
    "batch": "batch",
    "table": "rotation tables",
}


class Lifetime(NamedTuple):
    """`count` such buffers are alive from operation `first` to operation `last`, both included."""

    buffer: Buffer
    count: int
    first: int
    last: int


@dataclass
class Timeline:
    """The bytes alive during each operation. A buffer is alive from the first operation that touches it to the last.

    An operation that is recorded for many blocks shows the bytes alive in one of them, the one that is executed last:
    in forward that is the last of these blocks, in backward the first.
    """

    step: Step

    def __post_init__(self):
        s = self.step
        persistent = set(s.persistent)
        self.first, self.last = {}, {}  # buffer -> index of the operation
        for i, op in enumerate(s.ops):
            for buffer in op.storages:
                if buffer not in persistent:
                    self.first.setdefault(buffer, i)
                    self.last[buffer] = i
        self.persistent_bytes = sum(buffer.bytes * buffer.repeat for buffer in s.persistent)
        self.lifetimes = [Lifetime(buffer, 1, self.first[buffer], self.last[buffer]) for buffer in self.first]
        self.lifetimes += self.lifetimes_in_other_blocks()
        self.live = self.bytes_over_time(self.first, self.persistent_bytes)
        self.peak = max(self.live)
        self.peak_op = s.ops[self.live.index(self.peak)]

    def lifetimes_in_other_blocks(self):
        """Yield the lifetimes of the buffers of the blocks that are not recorded, but are like a recorded block.

        What forward saves is alive in all of these blocks when the last of them is executed in forward, and still when
        the first of them is executed in backward. Their parameters' gradients are all there when backward has passed
        them.
        """
        ops = self.step.ops
        in_block = [i for i, op in enumerate(ops) if op.repeat > 1 and op.phase != "optimizer"]
        # Where the recorded block starts and ends: in forward, in backward, in the next micro-step's forward, ...
        starts = [i for i in in_block if ops[i - 1].repeat == 1]
        ends = [i for i in in_block if ops[i + 1].repeat == 1]
        for buffer, first in self.first.items():
            op, last = ops[first], self.last[buffer]
            if op.repeat == 1 or op.phase == "optimizer":
                continue
            n_others, last_phase = op.repeat - 1, ops[last].phase
            i = sum(start <= first for start in starts) - 1
            if buffer.kind == "grad":
                yield Lifetime(buffer, n_others, ends[i] + 1, last)
            elif op.phase == "forward" and last_phase == "backward":
                yield Lifetime(buffer, n_others, starts[i], ends[i + 1])
            elif op.phase == "forward" and buffer.kind == "copy":
                yield Lifetime(buffer, n_others, starts[i], last)

    def bytes_over_time(self, buffers, before=0):
        """Return how many bytes of the given buffers are alive during each operation, plus `before`."""
        change, buffers = [before] + [0] * len(self.step.ops), set(buffers)
        for buffer, count, first, last in self.lifetimes:
            if buffer in buffers:
                change[first] += buffer.bytes * count
                change[last + 1] -= buffer.bytes * count
        return list(itertools.accumulate(change[:-1]))

    def alive(self, op):
        """Return (buffer, count) for all that are alive during an operation, the persistent buffers first."""
        i = self.step.ops.index(op)
        persistent = [(buffer, buffer.repeat) for buffer in self.step.persistent]
        return persistent + [(buffer, count) for buffer, count, first, last in self.lifetimes if first <= i <= last]

    def category(self, buffer):
        """Return the line of the report that a buffer belongs to."""
        if buffer.kind in CATEGORIES:
            return CATEGORIES[buffer.kind]
        op = self.step.ops[self.first[buffer]]
        if op.recomputed:
            return "recomputed activations"
        if op.group in ("head", "loss"):
            return "logits and loss"
        return "saved activations" if op.phase == "forward" else "gradients of activations"

    def by_category(self, buffers):
        """Return {line of the report: bytes} of (buffer, count) pairs."""
        result = Counter()
        for buffer, count in buffers:
            result[self.category(buffer)] += buffer.bytes * count
        return result

    def saved(self):
        """Return (buffer, count) for all that the forward pass of a micro-step makes and its backward pass reads."""
        ops = self.step.ops
        start = next(i for i, op in enumerate(ops) if op.phase == "backward")
        saved = (b for b, first in self.first.items() if first < start <= self.last[b])
        return [(buffer, ops[self.first[buffer]].repeat) for buffer in saved]


def step_memory(s):
    """Return the bytes of a step by what they are for, the peak, and what is alive at the peak."""
    c, t = s.config, Timeline(s)
    params = sum(p.bytes * p.repeat for p in s.params.values())
    saved = t.by_category(t.saved())
    at_peak = t.by_category(t.alive(t.peak_op))
    losses = [buffer for buffer in t.first if t.category(buffer) == "logits and loss"]
    kv_elements = 2 * c.n_layer * c.n_kv_head * c.head_dim if c.model == "transformer" else 0  # per token
    return {
        "params": params,
        "gradients": params,
        "optimizer": sum(b.bytes * b.repeat for b in s.persistent if b.kind == "state"),
        "activations": saved["saved activations"],
        "weight_copies": saved["weight copies"],
        "loss": max(t.bytes_over_time(losses)),
        "batch": sum(b.bytes for b in s.persistent if b.kind == "batch"),
        "kv_cache_per_token": kv_elements * SIZES[operation_dtype("attention", c.dtype, s.spec.kind)],
        "checkpoint": 3 * params,  # weights and both moments, without headers of a few KB
        "peak": t.peak,
        "peak_at": f"{t.peak_op.phase}, {t.peak_op.name}",
        "at_peak": dict(at_peak),
        "pinned_host": 2 * 2 * 8 * c.batch_size * c.block_size if s.spec.kind == "cuda" else 0,  # two batches
        "card": card_memory(t) if s.spec.kind == "cuda" else None,
    }


def card_memory(t):
    """Return what a CUDA card holds at the peak in addition to tensors: {name: (least, most) bytes}.

    These are estimates. The allocator rounds each tensor up to 512 bytes. torch's default workspace for matmuls is
    8.1 MiB, and 32 MiB on Hopper. torch does not count CUDA's context. Fragmentation is memory that is reserved but not
    used, 2 to 10 % of the peak.
    """
    rounding = sum(-buffer.bytes % 512 * count for buffer, count in t.alive(t.peak_op))
    return {
        "allocator rounding": (rounding, rounding),
        "cuBLAS workspace": (8_519_680, 2**25),
        "CUDA context": CUDA_CONTEXT_BYTES,
        "fragmentation": (t.peak // 50, t.peak // 10),
    }
