"""The arithmetic of a run, before it runs: parameters, FLOPs, bytes over time and their peak, step time.

    python accounting.py configs/gpt2.py --gpu=a100-40gb

A step is written down once, in schedule.py; prediction.py folds over that list, and this file prints what it finds.
"""

import json
import sys
from dataclasses import dataclass, field, replace

import cluster
import explain
import planning
import roofline
import techniques
from config import Config, ConfigError, command, load, parse, read_file, require, resolve
from hardware import Device, accelerator, local_device
from prediction import ASSUMED_MFU, Timeline, largest_batch, predict, refit
from schedule import schedule
from units import duration, mib, parse_memory, positive, si

# --- the report


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
    if flops["hardware_per_step"] > flops["per_step"]:
        more = flops["hardware_per_step"] / flops["per_step"]
        yield f"            {more:.2f} x that in hardware: recompute={c.recompute!r} makes again what backward needs"
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
    if memory["card"]:
        yield "  on the card besides, as estimated:"
        for name, (least, most) in ((name, pair) for name, pair in memory["card"].items() if pair[1]):
            yield f"    {name:<25}{mib(least):>12}{f' to {mib(most)}' if most > least else ''}"
    if memory["pinned_host"]:
        yield f"  {'pinned host memory':<27}{mib(memory['pinned_host']):>12}  two batches on their way to the card"
    if time["step_s"]:
        basis = {
            "timed": f"{time['mfu']:.0%} of the peak, the sum of its operations, each timed here",
            "estimated": f"{time['mfu']:.0%} of the peak, estimated from operations timed here",
            "assumed": f"at an assumed {time['mfu']:.0%} of the peak (--mfu)",
        }[time["basis"]]
        yield (
            f"time        {duration(time['step_s'])} a step, {time['tokens_per_s']:,.0f} tokens/s, "
            f"{duration(time['total_s'])} in all, {basis}"
        )
        least, most = (duration(time["step_s"] * (1 + sign * time["band"])) for sign in (-1, 1))
        yield f"            expect {least} to {most} a step"
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
        if op.repeat > 1 and op.layer is not None:
            place = f"layers {op.layer} to {op.layer + op.repeat - 1}"
        name = op.phase if op.phase == place else f"{op.phase} {place}"
        again = f", {op.times // op.repeat} times" if op.times > op.repeat else ""
        if not rows or rows[-1][0] != name + again:
            rows.append([name + again, 0, False])
        rows[-1][1] = max(rows[-1][1], live)
        rows[-1][2] |= op is t.peak_op
    yield f"timeline    the most that is alive in each part of a step; {mib(t.standing_bytes)} stand through all of it"
    for name, most, at_peak in rows:
        mark = f"  peak: {t.peak_op.name}" if at_peak else ""
        yield f"  {name:<28}{mib(most):>12}  {'#' * round(width * most / t.peak)}{mark}"


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


# --- the command line


HALF = ("float32", "bfloat16", "float16")  # matmuls of a card given by hand


@dataclass(frozen=True)
class Options:
    """Predict what a run will take, without running it: parameters, FLOPs, memory and its peak, time."""

    gpu: str | None = None  # a card of the table, such as h100-sxm; None: this machine
    memory: str | None = field(default=None, metadata={"bare": ""})  # what may be used, as 39.5GiB; bare: the timeline
    peak_flops: float | None = None  # the device's dense FLOP/s, by hand: of a card no table knows, or measured
    bandwidth: float | None = None  # of the device's memory, bytes/s, by hand
    mfu: float | None = None  # fraction of the peak; None: of operations timed here where there are such, else 0.4
    roofline: bool = False  # where the time goes: each group's FLOPs, bytes and bound, and those of generation
    explain: bool = False  # every formula with its numbers put in, instead of the report
    tensors: bool = False  # what a tensor is: pointers, strides, views and copies; what a dtype holds and loses
    vs: str | None = None  # a second config file, the flags go for both: the predictions and their difference
    techniques: bool = False  # what half precision, chunks, recomputation, sharding and so on change
    compare: bool = False  # every accelerator of the table for this config
    plan: bool = False  # the compute-optimal run of --hours on the device, as a config file
    hours: float = 24.0  # of --plan
    params: float | None = None  # with --tokens: time and price of a run of which only the size is known
    tokens: float | None = None  # to train on
    n_gpus: int = 1  # that share the run, or the parameters of --params and --max_params
    price: float | None = None  # per GPU-hour
    max_params: bool = False  # how many parameters have room on --n_gpus
    bytes_per_param: float = 16.0  # of --max_params: float32 weight, gradient, two moments
    json: bool = False  # print everything as JSON, for programs


@command
def main(argv):
    config, options = load(argv, Options)
    check_mfu(options.mfu)
    device = find_device(config, options)
    memory_bytes = parse_memory(options.memory or None)
    check_questions(options)
    flags = {name: value for name, value in parse(argv, (Config, Options), "")[1].items() if hasattr(config, name)}
    answered = answer(config, options, device, memory_bytes, flags)
    if answered:
        result, lines = answered
        print(json.dumps(result, indent=2) if options.json else "\n".join(lines))
        return 0
    config = resolve(config, device)
    prediction = predict(config, device, memory_bytes, options.mfu)
    if options.n_gpus > 1:
        found = cluster.on_cluster(config, device, options.n_gpus, memory_bytes, options.mfu)
        prediction |= {"cluster": found, "fits": found["fits"], "time": cluster.spread(prediction["time"], found)}
    hours = prediction["time"]["total_s"] and prediction["time"]["total_s"] / 3600 * options.n_gpus
    if options.price is not None:
        require(0 < options.price <= 1e6, f"--price={options.price:g} must lie in (0, 1e6]")
        prediction["time"]["price"] = hours and hours * options.price
    if options.json:
        print(json.dumps(everything(config, device, prediction), indent=2))
        return 0
    if options.explain:
        print("\n".join(explain.explain(config, device, options.mfu)))
        return 0
    print("\n".join(report(config, device, prediction)))
    if options.price is not None and hours:
        price = f"{prediction['time']['price']:,.2f}, in the currency of the price per GPU-hour"
        print(f"price       {hours:,.1f} GPU-hours: {price}")
    if options.n_gpus > 1:
        print("\n".join(cluster.lines(found, device)))
        require(found["fits"] is not False, f"{mib(found['peak'])} on each GPU, but {device.name} has less")
        return 0
    if options.memory == "":
        print("\n".join(timeline(schedule(config, device))))
    if options.roofline:
        print("\n".join(roofline.lines(config, device)))
    if prediction["fits"] is False:
        print("\n".join(planning.remedies_lines(planning.remedies(config, device, memory_bytes, options.mfu), device)))
    refuse_what_cannot_fit(config, device, prediction)
    return 0


def find_device(config, o):
    """Return the device that the options mean: a card of the table, this machine's, or one given by hand."""
    given = {name: getattr(o, name) for name in ("peak_flops", "bandwidth") if getattr(o, name) is not None}
    positive(**{f"--{name}": value for name, value in given.items()})
    if o.gpu is None and not given:
        return local_device(config.device)
    device = accelerator(o.gpu) if o.gpu is not None else Device("a card given by hand", "cuda", dtypes=HALF)
    peaks = dict.fromkeys(HALF, o.peak_flops) if o.peak_flops else device.peak_flops
    source = "given by hand" if o.peak_flops else device.source
    return replace(device, peak_flops=peaks, bandwidth=o.bandwidth or device.bandwidth, source=source)


def check_mfu(mfu):
    require(mfu is None or 0 < mfu <= 1, f"--mfu={mfu} must lie in (0, 1]")


def check_questions(o):
    """Raise ConfigError where options ask two questions at once, or one is without its own."""
    require((o.params is None) == (o.tokens is None), "--params and --tokens go together")
    asked = {"params": o.params is not None, "vs": o.vs is not None}
    asked |= {name: getattr(o, name) for name in ("max_params", "plan", "compare", "explain", "techniques", "tensors")}
    several = [f"--{name}" for name, yes in asked.items() if yes]
    require(len(several) <= 1, f"{' and '.join(several)} are questions of their own: ask one at a time")
    alone = [name for name, yes in asked.items() if yes and name not in ("params", "max_params")]
    require(o.n_gpus == 1 or not alone, f"--n_gpus does not go with --{''.join(alone)}, which is about one device")
    require(o.price is None or not alone, f"--price does not go with --{''.join(alone)}")


def answer(config, o, device, memory_bytes, flags):
    """Return (result, lines) of a question that a room beside this one answers; None where none is asked."""
    p, mfu = planning, o.mfu or ASSUMED_MFU
    if o.tensors:
        import tensors  # not above: it needs torch

        return tensors.everything(), tensors.lines()
    if o.techniques:
        rows = techniques.techniques(resolve(config, device), device)
        return rows, techniques.lines(rows)
    if o.params is not None:
        result = p.napkin(o.params, o.tokens, device, o.n_gpus, mfu, o.price)
        return {"time": result}, p.napkin_lines(result, device, o.n_gpus, mfu)
    if o.max_params:
        n = p.max_params(device, o.n_gpus, o.bytes_per_param, memory_bytes)
        return {"max_params": n}, p.max_params_lines(n, o.bytes_per_param)
    if o.plan:
        result = p.plan(device, o.hours, mfu, memory_bytes)
        return result, p.plan_lines(result)
    if o.compare:
        rows = p.compare_cards(config, mfu)
        return rows, p.compare_cards_lines(rows, mfu)
    if o.vs is not None:
        other = Config(**read_file(o.vs) | flags)
        result = p.compare(resolve(config, device), resolve(other, device), device, memory_bytes, o.mfu)
        return result, p.compare_lines(result)
    return None


def everything(config, device, prediction):
    """Return the prediction with what takes longer: the timeline, the largest batch, the roofline where it is known."""
    s = schedule(config, device)
    steps = zip(s.ops, Timeline(s).live, strict=True)
    prediction["memory"]["timeline"] = [
        {"phase": op.phase, "operation": op.name, "times": op.times, "bytes": live} for op, live in steps
    ]
    available = prediction["memory"]["available"]
    lacking = prediction["fits"] is False and "cluster" not in prediction
    prediction["remedies"] = planning.remedies(config, device, available)["remedies"] if lacking else []
    prediction["max_batch_size"] = largest_batch(config, device, available) if available else None
    known = device.peak(config.dtype) and device.bandwidth
    prediction["roofline"] = roofline.roofline(config, device) if known else None
    return prediction


if __name__ == "__main__":
    sys.exit(main())
