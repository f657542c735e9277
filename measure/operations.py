"""How long single operations take on this machine.

Each distinct operation of a training step is run alone for some milliseconds. Its time is kept in hardware.local.json
by device, dtype and shape. estimate/step_time.py adds the times up, for configs that were never run as well. RUN says
how to run each kind of operation, by the same calls as in model.py: a new kind of operation needs an entry there.
"""

import math
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from einops import rearrange

from estimate.flops import step_flops
from estimate.step import training_step
from estimate.step_time import step_time
from hardware.spec import DeviceSpec
from measure.machine import cross_core_s_per_byte, keep, raised_peak, synchronize
from model import rotate
from ops.attention import TiledAttention
from ops.loss import add_head_gradient, turn_into_gradient
from ops.rms_norm import RMSNormFunction
from optimizer import AdamW

PROBES, PROBE_SECONDS = 4, 0.5  # operations that are timed first, if that takes no longer, however short the run
RUNS, ROUNDS = 5, 2  # runs of an operation in a row, and how often all operations take turns
# Between two runs so much other memory is touched, as the operations between do in a step: about half of the last
# level of a CPU's cache, which keeps what was used just now and loses the weights; more than all of a GPU's.
OTHER_BYTES = {"cpu": 2**24, "cuda": 2**27}


def heads(x):
    return rearrange(x, "b t n d -> b n t d")


def attention(y, q, k, v):
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, enable_gqa=grouped)
    return rearrange(out, "b n t d -> b t (n d)")


def tiled_attention(y, q, k, v):
    return rearrange(TiledAttention.apply(heads(q), heads(k), heads(v)), "b n t d -> b t (n d)")


def split(y, x, *views):
    parts = x.split([math.prod(view.shape[2:]) for view in views], -1)
    if y.ndim == 3:  # a gate and its value
        return list(parts)
    return [rearrange(part, "b t (n d) -> b t n d", d=y.shape[3]) for part in parts]


def head_gradient(y, dlogits, x, dweight):
    add_head_gradient(dlogits, x, dweight)
    return dweight


def windows(y, x):
    return rearrange(x.unfold(1, y.shape[-1] // x.shape[-1], 1), "b t c m -> b t (m c)")


# Kind of operation -> what computes it: y is like the output, the rest are what the schedule names as its inputs.
RUN = {
    "cast": lambda y, x: x.to(y.dtype),
    "linear": lambda y, *inputs: F.linear(*inputs),
    "layernorm": lambda y, x, *gains: F.layer_norm(x, x.shape[-1:], *gains),
    "rmsnorm": lambda y, x, gain: RMSNormFunction.apply(x, gain, 1e-5),
    "head norm": lambda y, x: RMSNormFunction.apply(x, None, 1e-5),
    "rotate": lambda y, x, cos, sin: rotate(x, cos, sin),
    "split": split,
    "attention": attention,
    "tiled attention": tiled_attention,
    "repeat": lambda y, x: x.repeat_interleave(y.shape[2] // x.shape[2], 2),
    "v by heads": lambda y, x: heads(x).contiguous(),
    "scale": lambda y, x: x * 0.5,
    "scores": lambda y, q, k: heads(q) @ heads(k).mT,
    "softmax": lambda y, x: x.softmax(-1),
    "weighted values": lambda y, weights, v: weights @ v.reshape(y.shape),
    "join heads": lambda y, x: rearrange(x, "b n t d -> b t (n d)"),
    "gelu": lambda y, x: F.gelu(x),
    "silu": lambda y, x: F.silu(x),
    "gated": lambda y, a, b: a * b,
    "relu": lambda y, x: F.relu(x),
    "square": lambda y, x: x * x,
    "dropout": lambda y, x: F.dropout(x, 0.1),
    "add": lambda y, a, b: a + b,
    "embedding": lambda y, table, idx: F.embedding(idx, table),
    "padded": lambda y, x: F.pad(x, (0, 0, y.shape[1] - x.shape[1], 0)),
    "windows": windows,
    "log-softmax": lambda y, x: F.log_softmax(x.flatten(0, 1), -1),
    "loss": lambda y, x, targets: F.nll_loss(x, targets.flatten()),
    "zero": lambda y, x: torch.zeros_like(x),
    "chunk loss": lambda y, logits, targets: turn_into_gradient(logits, targets.flatten()[: len(logits)], 1.0),
    "chunk gradient of head": head_gradient,
    "chunk gradient of x": lambda y, dlogits, head: dlogits @ head,
    "add gradients": lambda y, a, b: a.add_(b),
    "gradient norm": lambda y, x: torch.linalg.vector_norm(x),
}


def tensor(buffer, limit, device, draw):
    """Return a random tensor like a buffer: normal numbers, or ids below limit."""
    if buffer.dtype == "int64":
        return torch.randint(limit, buffer.shape, device=device, generator=draw)
    x = torch.randn(buffer.shape, device=device, generator=draw).to(getattr(torch, buffer.dtype))
    return x.requires_grad_(buffer.kind not in ("table", "grad", "state"))


def optimizer_step(p, compiled):
    """Return AdamW's step on one parameter; without its gradient it does all but the update."""
    return AdamW([{"params": [p], "weight_decay": 0.1}], 1e-3, (0.9, 0.95), compiled=compiled).step


def runner(op, device: torch.device):
    """Return two functions: one runs an operation of a schedule once, the other what that run does besides."""
    draw = torch.Generator(device).manual_seed(0)  # its own: measuring must not change what a run draws
    limit = min(op.inputs[0].shape)
    inputs = [tensor(buffer, limit, device, draw) for buffer in op.inputs]
    y = torch.empty(op.output.shape, dtype=getattr(torch, op.output.dtype), device="meta")
    if op.kind in ("update", "one-pass update"):
        compiled = op.kind != "update"
        idle = optimizer_step(inputs[0].detach(), compiled)
        inputs[0].grad = torch.randn(inputs[0].shape, device=device, generator=draw)
        return optimizer_step(inputs[0], compiled), idle
    if op.kind in ("add gradients", "gradient norm") or op.kind.startswith("chunk"):
        inputs = [x.detach() for x in inputs]
        return lambda: RUN[op.kind](y, *inputs), lambda: None
    if not op.is_gradient:
        return lambda: RUN[op.kind](y, *inputs), lambda: None
    outputs = RUN[op.kind](y, *inputs)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    chosen = {"add": inputs[1:], "split": inputs[:1]}.get(op.kind, inputs)  # the stream's own gradient is passed on
    chosen = [x for x in chosen if x.requires_grad]
    gradients = [torch.ones_like(out, requires_grad=False) for out in outputs]
    x = torch.ones(1, device=device, requires_grad=True)
    view = x.view(1, 1)
    return (
        lambda: torch.autograd.grad(outputs, chosen, gradients, retain_graph=True),
        lambda: torch.autograd.grad(view, x, view.detach(), retain_graph=True),
    )


def run_seconds(run, other, device: torch.device):
    """Return the seconds of one run, after other memory was touched."""
    other.add_(1)
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        synchronize(device)
        return start.elapsed_time(end) / 1e3
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def operation_seconds(op, device: torch.device):
    """Return the seconds of a few runs of an operation, each less what else a run takes."""
    other = torch.zeros(OTHER_BYTES.get(device.type, 2**27), dtype=torch.uint8, device=device)
    run, idle = runner(op, device)
    for f in (run, idle):
        f()  # the first one sets things up
    besides = statistics.median(run_seconds(idle, other, device) for _ in range(RUNS))
    seconds = []
    while len(seconds) < RUNS and (sum(seconds) < 0.1 or len(seconds) < 2):
        seconds.append(run_seconds(run, other, device) - besides)
    return seconds


def not_timed(ops, spec: DeviceSpec):
    """Return the distinct operations among ops that the spec has no times of, by their keys."""
    return {op.key: op for op in ops if op.kind and op.key[1] not in spec.op_times.get(op.key[0], {})}


def with_operation_times(spec: DeviceSpec, device: torch.device, config, run_s: float | None) -> DeviceSpec:
    """Return the spec with the times of a config's operations, where a CPU's run is long enough for that.

    run_s is the predicted time of the run. It rests on an assumed MFU, which may be far off. So the few longest
    operations are timed first, unless they take long, and tell how long the run will take. The rest is timed if that
    costs less than 2 % of the run.
    """
    if device.type != "cpu" or not (spec.bandwidth and spec.peak(config.dtype)):
        return spec
    spec = replace(spec, cross_core_s_per_byte=cross_core_s_per_byte(device))
    step = training_step(config, spec)
    peak, bandwidth = spec.peak(config.dtype), spec.bandwidth
    missing = list(not_timed(step.ops, spec).values())
    missing.sort(key=lambda op: op.least_seconds(peak, bandwidth) * op.times, reverse=True)
    for ops, allowed_s in ((missing[:PROBES], PROBE_SECONDS), (missing[PROBES:], 0.0)):
        cost = sum(0.015 + 3 * RUNS * ROUNDS * op.least_seconds(peak, bandwidth) for op in ops)
        if not ops or cost > max(allowed_s, 0.02 * (run_s or 0)):
            break
        spec = time_operations(ops, device, spec)
        keep(spec)
        run_s = step_time(replace(step, spec=spec), step_flops(step))["total_s"]
    return spec


def time_operations(ops, device: torch.device, spec: DeviceSpec) -> DeviceSpec:
    """Return the spec with the times of all distinct operations among ops; those it has are not measured again.

    A matmul that is faster than the peak raises the peak.
    """
    missing = not_timed(ops, spec)
    found = {key: [] for key in missing}
    for _ in range(ROUNDS):  # two visits some time apart: a busy neighbour does not spoil both
        for key, op in missing.items():
            found[key] += operation_seconds(op, device)
    times = {what: dict(known) for what, known in spec.op_times.items()}
    for (what, shapes), seconds in found.items():
        op = missing[what, shapes]
        seconds = max(1e-7, statistics.median(seconds))
        times.setdefault(what, {})[shapes] = [op.flops, op.bytes, seconds]
        if op.kind == "linear":
            spec = raised_peak(spec, op.output.dtype, op.flops / seconds, f"a matmul of {shapes}")
    return replace(spec, op_times=times)
