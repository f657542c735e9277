"""Predict what a run will take, without running it: parameters, FLOPs, memory and its peak, time.

    python accounting.py configs/gpt2.py --gpu=a100-40gb

Everything is computed in estimate/; this file holds the options and prints the answers.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

from cli.config_file import read_settings
from cli.errors import DoesNotFit, command, require
from cli.flags import load, parse
from cli.units import check_mfu, parse_memory, positive
from config import ROOT, Config, resolve
from estimate import budget, cluster, compare, fit, formulas, roofline, techniques
from estimate.memory import Timeline
from estimate.predict import predict
from estimate.report import report, timeline
from estimate.step import training_step
from estimate.step_time import ASSUMED_MFU
from hardware.accelerators import accelerator
from hardware.machine import local_device
from hardware.spec import DeviceSpec

USAGE = "python accounting.py CONFIG.py ..."
HALF = ("float32", "bfloat16", "float16")  # matmuls of a card given by hand


@dataclass(frozen=True)
class Options:
    """Predict what a run will take, without running it: parameters, FLOPs, memory and its peak, time.

    Exit status: 0 where the question was answered, 2 where it cannot be, 3 where the run does not fit into memory.
    """

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
    n_gpus: int = 1  # that share the run, or the parameters of --params and --max_params; the report is per GPU then
    price: float | None = None  # per GPU-hour
    max_params: bool = False  # how many parameters have room on --n_gpus
    bytes_per_param: float = 16.0  # of --max_params: float32 weight, gradient, two moments
    json: bool = False  # print everything as JSON, for programs


@command
def main(argv):
    config, options = load(argv, Config, Options, USAGE)
    check_mfu(options.mfu)
    spec = find_spec(config, options)
    memory_bytes = parse_memory(options.memory or None)
    check_questions(options)
    if options.tensors:  # in a process of its own: it needs torch, which nothing here imports
        line = [sys.executable, "-m", "tools.tensors", *(["--json"] if options.json else [])]
        return subprocess.run(line, cwd=ROOT, check=False).returncode
    flags = {name: value for name, value in parse(argv, (Config, Options), USAGE)[1].items() if hasattr(config, name)}
    answered = answer(config, options, spec, memory_bytes, flags)
    if answered:
        result, lines = answered
        print(json.dumps(result, indent=2) if options.json else "\n".join(lines))
        return 0
    config = resolve(config, spec)
    prediction = predict(config, spec, memory_bytes, options.mfu)
    if options.n_gpus > 1:
        found = cluster.on_cluster(config, spec, options.n_gpus, memory_bytes, options.mfu)
        times = cluster.cluster_times(prediction["time"], found)
        prediction |= {"cluster": found, "fits": found["fits"], "time": times}
        del prediction["memory"], prediction["tight"]  # which are one GPU's alone
    hours = prediction["time"]["total_s"] and prediction["time"]["total_s"] / 3600 * options.n_gpus
    if options.price is not None:
        require(0 < options.price <= 1e6, f"--price={options.price:g} must lie in (0, 1e6]")
        prediction["time"]["price"] = hours and hours * options.price
    if options.json:
        result = prediction if options.n_gpus > 1 else full_json(config, spec, prediction)
        print(json.dumps(result, indent=2))
        return DoesNotFit.status if prediction["fits"] is False else 0
    if options.explain:
        print("\n".join(formulas.explain(config, spec, options.mfu)))
        return 0
    lines = cluster.report if options.n_gpus > 1 else report
    print("\n".join(lines(config, spec, prediction)))
    if options.price is not None and hours:
        price = f"{prediction['time']['price']:,.2f}, in the currency of the price per GPU-hour"
        print(f"price       {price}, for {hours:,.1f} GPU-hours")
    if options.n_gpus > 1:
        cluster.refuse_what_cannot_fit(spec, prediction)
        return 0
    if options.memory == "":
        print("\n".join(timeline(training_step(config, spec))))
    if options.roofline:
        print("\n".join(roofline.lines(config, spec)))
    if prediction["fits"] is False:
        print("\n".join(fit.remedies_lines(fit.remedies(config, spec, memory_bytes, options.mfu), spec)))
    fit.refuse_what_cannot_fit(config, spec, prediction)
    return 0


def find_spec(config, o):
    """Return the device that the options mean: a card of the table, this machine's, or one given by hand."""
    given = {name: getattr(o, name) for name in ("peak_flops", "bandwidth") if getattr(o, name) is not None}
    positive(**{f"--{name}": value for name, value in given.items()})
    if o.gpu is None and not given:
        return local_device(config.device)
    spec = accelerator(o.gpu) if o.gpu is not None else DeviceSpec("a card given by hand", "cuda", dtypes=HALF)
    peaks = dict.fromkeys(HALF, o.peak_flops) if o.peak_flops else spec.peak_flops
    source = "given by hand" if o.peak_flops else spec.source
    return replace(spec, peak_flops=peaks, bandwidth=o.bandwidth or spec.bandwidth, source=source)


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


def answer(config, o, spec, memory_bytes, flags):
    """Return (result, lines) of the question that the options ask; None where they ask for the report."""
    mfu = o.mfu or ASSUMED_MFU
    if o.techniques:
        rows = techniques.techniques(resolve(config, spec), spec)
        return rows, techniques.lines(rows)
    if o.params is not None:
        result = budget.napkin(o.params, o.tokens, spec, o.n_gpus, mfu, o.price)
        return {"time": result}, budget.napkin_lines(result, spec, o.n_gpus, mfu)
    if o.max_params:
        n = budget.max_params(spec, o.n_gpus, o.bytes_per_param, memory_bytes)
        return {"max_params": n}, budget.max_params_lines(n, o.bytes_per_param)
    if o.plan:
        result = budget.plan(spec, o.hours, mfu, memory_bytes)
        return result, budget.plan_lines(result)
    if o.compare:
        rows = compare.compare_cards(config, mfu)
        return rows, compare.compare_cards_lines(rows, mfu)
    if o.vs is not None:
        other = Config(**read_settings(o.vs, Config) | flags)
        result = compare.compare(resolve(config, spec), resolve(other, spec), spec, memory_bytes, o.mfu)
        return result, compare.compare_lines(result)
    return None


def full_json(config, spec, prediction):
    """Return the prediction with what takes longer: the timeline, the largest batch, the roofline where it is known."""
    s = training_step(config, spec)
    steps = zip(s.ops, Timeline(s).live, strict=True)
    prediction["memory"]["timeline"] = [
        {"phase": op.phase, "operation": op.name, "times": op.times, "bytes": live} for op, live in steps
    ]
    available = prediction["memory"]["available"]
    lacking = prediction["fits"] is False and "cluster" not in prediction
    prediction["remedies"] = fit.remedies(config, spec, available)["remedies"] if lacking else []
    prediction["max_batch_size"] = fit.largest_batch(config, spec, available) if available else None
    known = spec.peak(config.dtype) and spec.bandwidth
    prediction["roofline"] = roofline.roofline(config, spec) if known else None
    return prediction


if __name__ == "__main__":
    sys.exit(main())
