"""The arithmetic of a run, before it runs: parameters, FLOPs, bytes over time and their peak, step time.

    python accounting.py configs/gpt2.py --gpu=a100-40gb

A step is written down once, in schedule.py; every figure here is a fold over that list.
"""

import dataclasses
import itertools
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field

from config import Config, ConfigError, command, load, parse, read_file, require, resolve
from hardware import accelerator, local_device, operation_dtype
from schedule import SIZES, Schedule, schedule

ASSUMED_MFU = 0.4  # of a step nobody has measured yet: what a well-kept trainer reaches on one GPU


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
        self.standing_bytes = sum(buffer.bytes for buffer in s.standing)
        self.live = self.bytes_over_time(self.first, self.standing_bytes)
        self.peak = max(self.live)
        self.peak_op = s.ops[self.live.index(self.peak)]

    def bytes_over_time(self, buffers, before=0):
        """Return how many bytes of the given buffers are alive during each operation, with those that were before."""
        change = [before] + [0] * len(self.schedule.ops)
        for buffer in buffers:
            change[self.first[buffer]] += buffer.bytes
            change[self.last[buffer] + 1] -= buffer.bytes
        return list(itertools.accumulate(change[:-1]))

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

    def by_category(self, buffers):
        """Return the bytes of buffers by their line of the report."""
        result = Counter()
        for buffer in buffers:
            result[self.category(buffer)] += buffer.bytes
        return result

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
    model, flops, memory = parameters(s), step_flops(s), step_memory(s)
    memory["available"] = memory_bytes or device.memory_bytes
    peak, bandwidth, step_s, least_s = device.peak(config.dtype), device.bandwidth, None, None
    if peak:
        step_s = flops["per_step"] / (peak * mfu)
    if peak and bandwidth:
        least_s = sum(op.least_seconds(peak, bandwidth) * op.times for op in s.ops)
    time = {
        "mfu": mfu,
        "peak_flops": peak,
        "peak_source": device.source,
        "step_s": step_s,
        "least_s": least_s,  # each operation alone at its bound, none fused and nothing in a cache
        "tokens_per_s": step_s and config.tokens_per_step / step_s,
        "total_s": step_s and step_s * config.max_iters,
        "days": step_s and step_s * config.max_iters / 86400,
    }
    fits = memory["peak"] <= memory["available"] if memory["available"] else None
    return {"model": model, "flops": flops, "memory": memory, "time": time, "fits": fits}


def parameters(s):
    """Return how many parameters there are, and how many multiply every token: matrices that are not just looked up.

    A tied table is looked up and multiplies too: it is the head.
    """
    looked_up = {"wpe"} if s.config.tie_weights else {"wte", "wpe"}
    matrices = [p for name, p in s.params.items() if len(p.shape) == 2 and name not in looked_up]
    return {"params": sum(p.numel for p in s.params.values()), "params_matmul": sum(p.numel for p in matrices)}


def step_flops(s):
    """Return a step's FLOPs, in three conventions, and what the hardware executes.

    per_step: every matmul, attention over all T^2 pairs of positions (PaLM's); causal_per_step: over the T (T + 1) / 2
    that the mask leaves; six_nd_per_token: 2 forward and 4 backward for each parameter, attention left out.
    hardware_per_step has recomputation in it, of which there is none yet: it is per_step.
    """
    T, tokens = s.config.block_size, s.config.tokens_per_step
    total, pairs, forward = (
        sum(op.flops * op.times for op in s.ops if chosen(op))
        for chosen in (lambda op: True, lambda op: op.is_attention, lambda op: op.phase == "forward")
    )
    return {
        "tokens_per_step": tokens,
        "six_nd_per_token": 6 * parameters(s)["params"],
        "forward_per_token": forward // tokens,
        "per_token": total // tokens,
        "per_step": total,
        "causal_per_step": total - pairs + pairs * (T + 1) // (2 * T),
        "hardware_per_step": total,
    }


def step_memory(s):
    """Return the bytes of a step by what they are for, and the peak with what is alive then."""
    c, t = s.config, Timeline(s)
    params = sum(p.bytes for p in s.params.values())
    saved = t.by_category(t.saved())
    at_peak = t.by_category(t.alive(t.peak_op))
    losses = [buffer for buffer in t.first if t.category(buffer) == "logits and loss"]
    cached = 2 * c.n_layer * c.n_kv_head * c.head_dim if c.model == "transformer" else 0  # keys and values, elements
    return {
        "params": params,
        "gradients": params,
        "optimizer": sum(b.bytes for b in s.standing if b.kind == "state"),
        "activations": saved["saved activations"],
        "weight_copies": saved["weight copies"],
        "loss": max(t.bytes_over_time(losses)),
        "batch": sum(b.bytes for b in s.standing if b.kind == "batch"),
        "kv_cache_per_token": cached * SIZES[operation_dtype("attention", c.dtype, s.device.kind)],
        "checkpoint": 3 * params,  # weights and both moments, but for headers of a few KB
        "peak": t.peak,
        "peak_at": f"{t.peak_op.phase}, {t.peak_op.name}",
        "at_peak": dict(at_peak),
    }


# --- what fits


def peak_lines(config, device):
    """Return the set of (fixed, slope): during an operation fixed + slope x batch_size bytes are alive.

    Exact, and two schedules are enough: each buffer either has the batch as a factor or does not depend on it. The peak
    is the maximum over these lines.
    """
    one, two = (Timeline(schedule(dataclasses.replace(config, batch_size=b), device)).live for b in (1, 2))
    return {(2 * a - b, b - a) for a, b in zip(one, two, strict=True)}


def peak_of(lines, batch_size):
    return max(fixed + slope * batch_size for fixed, slope in lines)


def largest_of(lines, memory_bytes):
    """Return the largest batch_size whose peak is within memory_bytes. No slope is 0: the batch itself is alive."""
    return max(0, min((memory_bytes - fixed) // slope for fixed, slope in lines))


def refit(config, device, memory_bytes):
    """Return the config with a micro-batch that fits and more of them, tokens per step as near as possible; or None.

    Of the upper half of batch sizes that fit, those that divide the sequences of a step come first, then the larger.
    """
    if peak_of(peak_lines(config, device), config.batch_size) <= memory_bytes:
        return config
    several = dataclasses.replace(config, gradient_accumulation_steps=max(2, config.gradient_accumulation_steps))
    largest = largest_of(peak_lines(several, device), memory_bytes)
    if not largest:
        return None
    total = config.batch_size * config.gradient_accumulation_steps
    sizes = range((largest + 1) // 2, largest + 1)
    size = min(sizes, key=lambda b: (abs(round(total / b) * b - total), -b))
    return dataclasses.replace(config, batch_size=size, gradient_accumulation_steps=round(total / size))


def largest_batch(config, device, memory_bytes):
    """Return the largest batch_size that fits into memory_bytes; 0 where not even 1 does."""
    return largest_of(peak_lines(config, device), memory_bytes)


def refuse_what_cannot_fit(config, device, prediction):
    """Raise ConfigError with the largest batch_size that fits, or with the news that none does."""
    if prediction["fits"] is not False:
        return
    memory = prediction["memory"]
    peak, available = memory["peak"], memory["available"]
    states = sum(memory[key] for key in ("params", "gradients", "optimizer"))
    largest, fitting = largest_batch(config, device, available), refit(config, device, available)
    if fitting:
        same = f"--batch_size={fitting.batch_size} --gradient_accumulation_steps={fitting.gradient_accumulation_steps}"
        way_out = f"{same} takes {fitting.tokens_per_step:,} of {config.tokens_per_step:,} tokens a step in less"
    elif largest:
        way_out = "it leaves no room for accumulation"
    elif states > available:
        way_out = f"batch size cannot help: parameters, gradients and optimizer state alone need {mib(states)}"
    else:
        way_out = "not even --batch_size=1 fits; a shorter --block_size or a smaller model would"
    most = f"; --batch_size={largest} is the largest that fits" if largest else ""
    raise ConfigError(
        f"batch_size={config.batch_size} needs {mib(peak)} at its peak ({memory['peak_at']}), "
        f"but {device.name} has {mib(available)}{most}; {way_out}"
    )


# --- the report


def mib(n):
    """Return bytes in KiB, MiB or GiB."""
    if n < 2**20:
        return f"{n / 2**10:,.1f} KiB"
    return f"{n / 2**20:,.1f} MiB" if n < 2**30 else f"{n / 2**30:,.2f} GiB"


def si(n, unit=""):
    """Return a number in three digits with its SI prefix and unit, such as 874 GFLOP."""
    for power, prefix in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(n) >= 10**power:
            return f"{n / 10**power:.3g} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def duration(seconds):
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
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
        if time["least_s"]:
            least = duration(time["least_s"])
            yield f"            {least} a step with each operation alone at its roofline, none fused and nothing cached"
    else:
        yield "time        unknown without the device's peak: name another card with --gpu, or train here to measure it"


def timeline(s, width=40):
    """Yield the bytes alive over a step as bars, a row per layer and phase, the most of each."""
    t = Timeline(s)
    rows = []  # [name, most bytes alive, whether the peak is there]
    for op, live in zip(s.ops, t.live, strict=True):
        place = op.group if op.layer is None else f"layer {op.layer}"
        name = op.phase if op.phase == place else f"{op.phase} {place}"
        again = f", {op.times} times" if op.times > 1 else ""
        if not rows or rows[-1][0] != name + again:
            rows.append([name + again, 0, False])
        rows[-1][1] = max(rows[-1][1], live)
        rows[-1][2] |= op is t.peak_op
    yield f"timeline    the most that is alive in each part of a step; {mib(t.standing_bytes)} stand through all of it"
    left_out = None  # of many layers alike, the first and the last three
    for name, most, at_peak in rows:
        layer = re.search(r"layer (\d+)", name)
        if layer and 3 <= int(layer[1]) < s.config.n_layer - 3 and s.config.n_layer > 16 and not at_peak:
            left_out = left_out or "  ..."
            continue
        if left_out:
            yield left_out
            left_out = None
        mark = f"  peak: {t.peak_op.name}" if at_peak else ""
        yield f"  {name:<28}{mib(most):>12}  {'#' * round(width * most / t.peak)}{mark}"


# --- the command line


@dataclass(frozen=True)
class Options:
    """Predict what a run will take, without running it: parameters, FLOPs, memory and its peak, time."""

    gpu: str | None = None  # a card of the table, such as h100-sxm; None: this machine
    memory: str | None = field(default=None, metadata={"bare": ""})  # what may be used, as 39.5GiB; bare: the timeline
    mfu: float = ASSUMED_MFU  # fraction of the peak that the step is assumed to reach
    roofline: bool = False  # where the time goes: each group's FLOPs, bytes and bound, and those of generation
    explain: bool = False  # every formula with its numbers put in, instead of the report
    vs: str | None = None  # a second config file, the flags go for both: the predictions and their difference
    compare: bool = False  # every accelerator of the table for this config
    plan: bool = False  # the compute-optimal run of --hours on the device, as a config file
    hours: float = 24.0  # of --plan
    params: float | None = None  # with --tokens: time and price of a run of which only the size is known
    tokens: float | None = None  # to train on
    n_gpus: int = 1  # of --params and --max_params
    price: float | None = None  # per GPU-hour
    max_params: bool = False  # how many parameters have room on --n_gpus
    bytes_per_param: float = 16.0  # of --max_params: float32 weight, gradient, two moments
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
    device = local_device(config.device) if options.gpu is None else accelerator(options.gpu)
    memory_bytes = parse_memory(options.memory or None)
    check_questions(options)
    flags = {name: value for name, value in parse(argv, (Config, Options), "")[1].items() if hasattr(config, name)}
    planned = plan(config, options, device, memory_bytes, flags)
    if planned:
        result, lines = planned
        print(json.dumps(result, indent=2) if options.json else "\n".join(lines))
        return 0
    config = resolve(config, device)
    prediction = predict(config, device, memory_bytes, options.mfu)
    if options.json:
        print(json.dumps(everything(config, device, prediction), indent=2))
        return 0
    if options.explain:
        import explain  # these are rooms of their own, built on this one

        print("\n".join(explain.explain(config, device, options.mfu)))
        return 0
    print("\n".join(report(config, device, prediction)))
    if options.memory == "":
        print("\n".join(timeline(schedule(config, device))))
    if options.roofline:
        import roofline

        print("\n".join(roofline.lines(config, device)))
    if prediction["fits"] is False:
        import planning

        print("\n".join(planning.remedies_lines(planning.remedies(config, device, memory_bytes, options.mfu), device)))
    refuse_what_cannot_fit(config, device, prediction)
    return 0


def check_questions(o):
    """Raise ConfigError where options ask two questions at once, or one is without its own."""
    require((o.params is None) == (o.tokens is None), "--params and --tokens go together")
    asked = {"params": o.params is not None, "max_params": o.max_params, "plan": o.plan, "compare": o.compare,
             "vs": o.vs is not None, "explain": o.explain}  # fmt: skip
    several = [f"--{name}" for name, yes in asked.items() if yes]
    require(len(several) <= 1, f"{' and '.join(several)} are questions of their own: ask one at a time")
    require(o.n_gpus == 1 or asked["params"] or asked["max_params"], "--n_gpus goes with --params or --max_params")
    require(o.price is None or asked["params"], "--price goes with --params and --tokens")


def plan(config, o, device, memory_bytes, flags):
    """Return (result, lines) of a question that planning.py answers, or None where none was asked."""
    import planning as p

    if o.params is not None:
        result = p.napkin(o.params, o.tokens, device, o.n_gpus, o.mfu, o.price)
        return {"time": result}, p.napkin_lines(result, device, o.n_gpus, o.mfu)
    if o.max_params:
        n = p.max_params(device, o.n_gpus, o.bytes_per_param, memory_bytes)
        return {"max_params": n}, p.max_params_lines(n, o.bytes_per_param)
    if o.plan:
        result = p.plan(device, o.hours, o.mfu, memory_bytes)
        return result, p.plan_lines(result)
    if o.compare:
        rows = p.compare_cards(config, o.mfu)
        return rows, p.compare_cards_lines(rows, o.mfu)
    if o.vs is not None:
        other = Config(**read_file(o.vs) | flags)
        result = p.compare(resolve(config, device), resolve(other, device), device, memory_bytes, o.mfu)
        return result, p.compare_lines(result)
    return None


def everything(config, device, prediction):
    """Return the prediction with what takes longer: the timeline, the largest batch, the roofline where it is known."""
    import planning
    import roofline

    s = schedule(config, device)
    steps = zip(s.ops, Timeline(s).live, strict=True)
    prediction["memory"]["timeline"] = [{"phase": op.phase, "operation": op.name, "bytes": live} for op, live in steps]
    available = prediction["memory"]["available"]
    prediction["remedies"] = planning.remedies(config, device, available)["remedies"] if available else []
    prediction["max_batch_size"] = largest_batch(config, device, available) if available else None
    known = device.peak(config.dtype) and device.bandwidth
    prediction["roofline"] = roofline.roofline(config, device) if known else None
    return prediction


if __name__ == "__main__":
    import accounting  # itself, by its name: what builds on it must not find a second copy

    sys.exit(accounting.main())
