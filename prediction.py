"""What a run will take, as folds over a step's schedule: parameters, FLOPs, bytes over time and their peak, seconds."""

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from dataclasses import dataclass

from hardware import attention_kind, operation_dtype, tile_size
from schedule import SIZES, Schedule, schedule

ASSUMED_MFU = 0.4  # of a step nobody has measured yet: what a well-kept trainer reaches on one GPU
# How far measured step times may be from predicted ones: all operations timed; some estimated from others; assumed MFU.
TIMED_BAND, ESTIMATED_BAND, ASSUMED_BAND = 0.15, 0.25, 0.5


# --- folds


@dataclass
class Timeline:
    """Bytes alive during each operation. A buffer is alive from the first operation that touches it to the last.

    An operation recorded for many blocks stands for that one of them which runs next to the recorded last blocks: the
    last in forward, the first in backward.
    """

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
        self.standing_bytes = sum(buffer.bytes * buffer.repeat for buffer in s.standing)
        self.lives = [(buffer, 1, self.first[buffer], self.last[buffer]) for buffer in self.first]
        self.lives += self.lives_of_repeated_blocks()
        self.live = self.bytes_over_time(self.first, self.standing_bytes)
        self.peak = max(self.live)
        self.peak_op = s.ops[self.live.index(self.peak)]

    def lives_of_repeated_blocks(self):
        """Yield (buffer, count, first, last) of what the blocks that are not recorded keep beside the recorded one.

        What forward saves is alive in all of them when the last of them runs, and still is when the first of them runs
        backward; their gradients are there when all of them have run.
        """
        ops = self.schedule.ops
        runs = [(op, i) for i, op in enumerate(ops) if op.repeat > 1 and op.phase != "optimizer"]
        begins = [i for op, i in runs if ops[i - 1].repeat == 1]
        ends = [i for op, i in runs if ops[i + 1].repeat == 1]  # forward, backward, forward, backward
        for buffer, first in self.first.items():
            born, last = ops[first], self.last[buffer]
            if born.repeat > 1 and born.phase != "optimizer":
                run = sum(begin <= first for begin in begins) - 1
                if buffer.kind == "grad":
                    yield buffer, born.repeat - 1, ends[run] + 1, last
                elif born.phase == "forward" and (ops[last].phase == "backward" or buffer.kind == "copy"):
                    yield buffer, born.repeat - 1, begins[run], ends[run + 1] if ops[last].phase == "backward" else last

    def bytes_over_time(self, buffers, before=0):
        """Return how many bytes of the given buffers are alive during each operation, with those that were before."""
        change, buffers = [before] + [0] * len(self.schedule.ops), set(buffers)
        for buffer, count, first, last in self.lives:
            if buffer in buffers:
                change[first] += buffer.bytes * count
                change[last + 1] -= buffer.bytes * count
        return list(itertools.accumulate(change[:-1]))

    def alive(self, op):
        """Return (buffer, count) of those alive during an operation, what stands through the whole step first."""
        i = self.schedule.ops.index(op)
        standing = [(buffer, buffer.repeat) for buffer in self.schedule.standing]
        return standing + [(buffer, count) for buffer, count, first, last in self.lives if first <= i <= last]

    def category(self, buffer):
        """Return the line of the report that a buffer belongs to."""
        if buffer.kind in CATEGORIES:
            return CATEGORIES[buffer.kind]
        born = self.schedule.ops[self.first[buffer]]
        if born.again:
            return "recomputed activations"
        if born.group in ("head", "loss"):
            return "logits and loss"
        return "saved activations" if born.phase == "forward" else "gradients of activations"

    def by_category(self, buffers):
        """Return the bytes of (buffer, count) pairs by their line of the report."""
        result = Counter()
        for buffer, count in buffers:
            result[self.category(buffer)] += buffer.bytes * count
        return result

    def saved(self):
        """Return (buffer, count) of what a forward makes and its backward reads, of one micro-step."""
        ops = self.schedule.ops
        start = next(i for i, op in enumerate(ops) if op.phase == "backward")
        saved = (b for b, first in self.first.items() if first < start <= self.last[b])
        return [(buffer, ops[self.first[buffer]].repeat) for buffer in saved]


CATEGORIES = {
    "param": "parameters",
    "grad": "gradients",
    "state": "optimizer state",
    "copy": "weight copies",
    "batch": "batch",
    "table": "rotation tables",
}


def predict(config, device, memory_bytes=None, mfu=None):
    """Return all figures of a run as a nested dict: counts, FLOPs and bytes are integers, times seconds or None."""
    s = schedule(config, device)
    model, flops, memory = parameters(s), step_flops(s), step_memory(s)
    memory["available"] = memory_bytes or device.memory_bytes
    time = step_time(s, flops, mfu)
    fits = memory["peak"] <= memory["available"] if memory["available"] else None
    return {"model": model, "flops": flops, "memory": memory, "time": time, "fits": fits}


def parameters(s):
    """Return how many parameters there are, and how many multiply every token: matrices that are not just looked up.

    A tied table is looked up and multiplies too: it is the head.
    """
    looked_up = {"wpe"} if s.config.tie_weights else {"wte", "wpe"}
    matrices = [p for name, p in s.params.items() if len(p.shape) == 2 and name not in looked_up]
    params, params_matmul = (sum(p.numel * p.repeat for p in chosen) for chosen in (s.params.values(), matrices))
    return {"params": params, "params_matmul": params_matmul}


def step_flops(s):
    """Return a step's FLOPs, in three conventions, and what the hardware executes.

    per_step: every matmul, attention over all T^2 pairs of positions (PaLM's); causal_per_step: over the T (T + 1) / 2
    that the mask leaves; six_nd_per_token: 2 forward and 4 backward for each parameter, attention left out.
    hardware_per_step has what backward computes again in it, the others have not.
    """
    T, tokens = s.config.block_size, s.config.tokens_per_step
    total, pairs, forward, again = (
        sum(op.flops * op.times for op in s.ops if chosen(op))
        for chosen in (
            lambda op: not op.again,
            lambda op: op.is_attention and not op.again,
            lambda op: op.phase == "forward",
            lambda op: op.again,
        )
    )
    return {
        "tokens_per_step": tokens,
        "six_nd_per_token": 6 * parameters(s)["params"],
        "forward_per_token": forward // tokens,
        "per_token": total // tokens,
        "per_step": total,
        "causal_per_step": total - pairs + pairs * (T + 1) // (2 * T),
        "hardware_per_step": total + again,
    }


def step_memory(s):
    """Return the bytes of a step by what they are for, and the peak with what is alive then."""
    c, t = s.config, Timeline(s)
    params = sum(p.bytes * p.repeat for p in s.params.values())
    saved = t.by_category(t.saved())
    at_peak = t.by_category(t.alive(t.peak_op))
    losses = [buffer for buffer in t.first if t.category(buffer) == "logits and loss"]
    cached = 2 * c.n_layer * c.n_kv_head * c.head_dim if c.model == "transformer" else 0  # keys and values, elements
    return {
        "params": params,
        "gradients": params,
        "optimizer": sum(b.bytes * b.repeat for b in s.standing if b.kind == "state"),
        "activations": saved["saved activations"],
        "weight_copies": saved["weight copies"],
        "loss": max(t.bytes_over_time(losses)),
        "batch": sum(b.bytes for b in s.standing if b.kind == "batch"),
        "kv_cache_per_token": cached * SIZES[operation_dtype("attention", c.dtype, s.device.kind)],
        "checkpoint": 3 * params,  # weights and both moments, but for headers of a few KB
        "peak": t.peak,
        "peak_at": f"{t.peak_op.phase}, {t.peak_op.name}",
        "at_peak": dict(at_peak),
        "pinned_host": 2 * 2 * 8 * c.batch_size * c.block_size if s.device.kind == "cuda" else 0,  # two batches
        "card": card_memory(t) if s.device.kind == "cuda" else None,
    }


def card_memory(t):
    """Return what a CUDA card holds beside the peak's tensors, (least, most) bytes each: estimates, not measured here.

    The allocator gives multiples of 512 bytes; a matmul's workspace is torch's default, 8.1 MiB, on Hopper 32; the
    context is CUDA's own, outside torch's count; fragmentation is reserved and not in use, 2 to 10 % of the peak.
    """
    rounding = sum(-buffer.bytes % 512 * count for buffer, count in t.alive(t.peak_op))
    return {
        "allocator rounding": (rounding, rounding),
        "cuBLAS workspace": (8_519_680, 2**25),
        "CUDA context": (504 * 2**20, 942 * 2**20),
        "fragmentation": (t.peak // 50, t.peak // 10),
    }


# --- time


def step_time(s, flops, mfu=None):
    """Return the seconds of a step and a run, and what they rest on; None where nothing is known.

    Where operations were timed on the device, they are summed, with what a CPU's cores take longer where one reads what
    another wrote, which an operation run alone does not meet. Else it is the hardware's FLOPs over the peak, times an
    assumed utilisation: the one given, which always counts, or ASSUMED_MFU. `band` is how far the measured time may be
    from it, as a fraction.
    """
    c, device = s.config, s.device
    peak, bandwidth = device.peak(c.dtype), device.bandwidth
    step_s = least_s = None
    basis, band = "assumed", ASSUMED_BAND
    if mfu is None and device.op_times and peak and bandwidth:
        found = [(*expected_seconds(op, device, peak, bandwidth), op) for op in s.ops if op.kind]
        step_s = sum(seconds * op.times for seconds, _, op in found)
        step_s += device.crossing * sum(op.cached_bytes * op.times for op in s.ops)
        basis, band = ("timed", TIMED_BAND) if all(timed for _, timed, _ in found) else ("estimated", ESTIMATED_BAND)
        mfu = flops["per_step"] / (step_s * peak)
    elif peak:
        step_s = flops["hardware_per_step"] / (peak * (mfu or ASSUMED_MFU))
        mfu = flops["per_step"] / (step_s * peak)
    if peak and bandwidth:
        least_s = sum(op.least_seconds(peak, bandwidth) * op.times for op in s.ops)
    return {
        "basis": basis,
        "band": band,
        "mfu": mfu or ASSUMED_MFU,
        "peak_flops": peak,
        "peak_source": device.source,
        "step_s": step_s,
        "least_s": least_s,  # each operation alone at its bound, none fused and nothing in a cache
        "tokens_per_s": step_s and c.tokens_per_step / step_s,
        "total_s": step_s and step_s * c.max_iters,
        "days": step_s and step_s * c.max_iters / 86400,
    }


def expected_seconds(op, device, peak, bandwidth):
    """Return the seconds of an operation, once, and whether just this one was timed on the device.

    If not, it takes as many times its own roofline as those three take theirs that are nearest in FLOPs and bytes; of
    the same kind and dtypes, if there are such.
    """
    what, shapes = op.key
    known = device.op_times.get(what)
    if known and shapes in known:
        return known[shapes][2], True
    if op.flops == op.bytes == 0:
        return 0.0, True

    def roofline(flops, n_bytes):
        return flops / peak + n_bytes / bandwidth + 5e-6  # the last for the call

    def distance(flops, n_bytes):
        return math.hypot(math.log((1 + flops) / (1 + op.flops)), math.log((1 + n_bytes) / (1 + op.bytes)))

    pool = known.values() if known else itertools.chain(*(times.values() for times in device.op_times.values()))
    nearest = sorted((distance(f, b), seconds / roofline(f, b)) for f, b, seconds in pool)[:3]
    weights = [1 / (d * d + 1e-3) for d, _ in nearest]
    log = sum(w * math.log(ratio) for w, (_, ratio) in zip(weights, nearest, strict=True)) / sum(weights)
    return roofline(op.flops, op.bytes) * math.exp(log), False


# --- what fits


class Peaks:
    """The peak of a config at any batch size, from two schedules: during an operation fixed + slope x batch_size bytes
    are alive, as each buffer either has the batch as a factor or does not depend on it.

    So it is for batches of whole chunks of the loss, from one that fills a tile of attention on; between them a last
    chunk is smaller, and needs less. For each smaller batch there is a schedule of its own.
    """

    def __init__(self, config, device):
        self.config, self.device, self.least = config, device, 1
        if attention_kind(config.dtype, device.kind, False, config.attn_dropout) == "tiled attention":
            _, heads = tile_size(config.n_head // config.n_kv_head, config.block_size)
            self.least = -(-heads // config.n_kv_head)
        if config.loss_chunk:
            whole = config.loss_chunk // math.gcd(config.loss_chunk, config.block_size)
            self.least = -(-self.least // whole) * whole
        one, two = (self.timeline(b).live for b in (self.least, 2 * self.least))
        self.lines = {(2 * a - b, (b - a) // self.least) for a, b in zip(one, two, strict=True)}

    def timeline(self, batch_size):
        return Timeline(schedule(dataclasses.replace(self.config, batch_size=batch_size), self.device))

    def at(self, batch_size):
        if batch_size < self.least:
            return self.timeline(batch_size).peak
        return max(fixed + slope * batch_size for fixed, slope in self.lines)

    def largest(self, memory_bytes):
        """Return the largest batch_size whose peak is within memory_bytes; 0 where not even that of 1 is."""
        largest = min((memory_bytes - fixed) // slope for fixed, slope in self.lines)  # none is 0: the batch is alive
        if largest >= self.least:
            return largest
        return bisect.bisect_right(range(1, self.least), memory_bytes, key=self.at)


def refit(config, device, memory_bytes):
    """Return the config with a micro-batch that fits and more of them, tokens per step as near as possible; or None.

    Of the upper half of batch sizes that fit, those that divide the sequences of a step come first, then the larger.
    """
    if Peaks(config, device).at(config.batch_size) <= memory_bytes:
        return config
    several = dataclasses.replace(config, gradient_accumulation_steps=max(2, config.gradient_accumulation_steps))
    largest = Peaks(several, device).largest(memory_bytes)
    if not largest:
        return None
    total = config.batch_size * config.gradient_accumulation_steps
    sizes = range((largest + 1) // 2, largest + 1)
    size = min(sizes, key=lambda b: (abs(round(total / b) * b - total), -b))
    return dataclasses.replace(config, batch_size=size, gradient_accumulation_steps=round(total / size))


def largest_batch(config, device, memory_bytes):
    """Return the largest batch_size that fits into memory_bytes; 0 where not even 1 does."""
    return Peaks(config, device).largest(memory_bytes)
