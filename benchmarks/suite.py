"""Measures training, the optimizer, the loader and generation, alternating with torch's AdamW or with nanoGPT.

Each function yields its rows. `found` has an entry per repetition: what was measured before the turns, our figures, and
then the other program's.
"""

import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from benchmarks.ours import generation_lengths
from benchmarks.shapes import SHAPE, SHAPES
from benchmarks.turns import bench_processes, measure_alternating, speedup, spread
from config import resolve
from estimate.predict import predict
from estimate.tape import SIZES as BYTES
from measure.machine import copy_bandwidth, matmul_flops, synchronize
from model import build
from ops.choices import operation_dtype
from optimizer import AdamW, parameter_groups


def selected_configs(config, options, device, spec, default):
    """Yield (name, resolved config) of the shapes in --shape, or of the default ones."""
    for name in (options.shape or default).split(","):
        shape = dict(zip(SHAPE, SHAPES[name], strict=True))
        yield name, resolve(replace(config, **shape, gradient_accumulation_steps=1), spec)


def peak_flops(device, spec, dtype):
    """Return the FLOP/s that MFU is a fraction of: the known peak, or on a CPU those of a large matmul measured now."""
    return (device.type != "cpu" and spec.peak(dtype)) or matmul_flops(device, dtype, 2048)


def train(config, options, device, spec):
    """Yield a row per shape: the trainer's tokens/s, seconds per step, MFU and memory."""
    default = "tiny,small,gpt2,gpt2_b32,xl" if device.type == "cuda" else "tiny,small,gpt2"
    for name, c in selected_configs(config, options, device, spec, default):
        flops = predict(c, spec)["flops"]["per_step"]
        with bench_processes("train", [c], options.peer, 2**20) as processes:
            peak = partial(peak_flops, device, spec, c.dtype)
            n, found = measure_alternating([p.turn for p in processes], options.steps, options.repetitions, peak)
        ours = [a["seconds"] / n for _, a, *_ in found]
        step_s, peak_bytes = statistics.median(ours), found[-1][1]["peak_bytes"]
        row = {
            "shape": name,
            "dtype": c.dtype,
            "tokens_per_s": c.tokens_per_step / step_s,
            "step_s": step_s,
            "spread": spread(ours),
            "mfu": utilisation([flops / s for s in ours], [peak for peak, *_ in found]),
            "peak_bytes": peak_bytes,
        }
        if options.peer:
            theirs = [b["seconds"] / n for *_, b in found]
            row |= {"peer_tokens_per_s": c.tokens_per_step / statistics.median(theirs), **speedup(ours, theirs)}
            row |= {"peer_peak_bytes": found[-1][2]["peak_bytes"]}
            row |= {"memory_ratio": peak_bytes / row["peer_peak_bytes"]}
        yield row


def utilisation(attained, ceilings):
    """Return the median fraction of the ceiling that was attained; what exceeds every measured ceiling is the ceiling.

    Each ceiling was measured just before its turn, and may be too low if another program was busy then.
    """
    return statistics.median(rate / max(ceiling, rate) for rate, ceiling in zip(attained, ceilings, strict=True))


def optimizer(config, options, device, spec):
    """Yield a row per shape: the seconds of a step of our AdamW, and of torch's fused and foreach AdamW."""

    def timed(step):
        def run(n):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(n):
                step()
            synchronize(device)
            return {"seconds": time.perf_counter() - start}

        return run

    for name, c in selected_configs(config, options, device, spec, "gpt2"):
        model = build(c)
        model.init_weights(c.seed)
        model.to(device)
        for p in model.parameters():
            p.grad = torch.randn_like(p).mul_(1e-3)
        betas, scale, finite = (c.beta1, c.beta2), torch.ones((), device=device), torch.tensor(True, device=device)
        own = AdamW(parameter_groups(model, c.weight_decay), c.learning_rate, betas, compiled=c.compile_optimizer)
        fused, foreach = (
            torch.optim.AdamW(parameter_groups(model, c.weight_decay), c.learning_rate, betas, **kind)
            for kind in ({"fused": True}, {"foreach": True})
        )
        runs = [timed(step) for step in (partial(own.step, scale, finite), fused.step, foreach.step)]
        n, found = measure_alternating(runs, options.steps, options.repetitions)
        ours, fused, foreach = ([figures[i]["seconds"] / n for figures in found] for i in (1, 2, 3))
        yield {
            "shape": name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_s": statistics.median(ours),
            "spread": spread(ours),
            "fused_s": statistics.median(fused),
            **speedup(ours, fused),
            "foreach_s": statistics.median(foreach),
            "foreach_ratio": speedup(ours, foreach)["ratio"],
        }


def loader(config, options, device, spec):
    """Yield one row: the seconds that it takes to get a batch of 12 x 1,024 tokens."""
    shape = {"vocab_size": 50304, "block_size": 1024, "batch_size": 12, "gradient_accumulation_steps": 1}
    c, n_tokens = resolve(replace(config, **shape), spec), int(options.gigabytes * 1e9) // 2
    with bench_processes("loader", [c], options.peer, n_tokens) as processes:
        n, found = measure_alternating([p.turn for p in processes], options.steps, options.repetitions)
    ours = [a["seconds"] / n for _, a, *_ in found]
    row = {"shape": "B12 T1024", "file_bytes": 2 * n_tokens, "batch_s": statistics.median(ours), "spread": spread(ours)}
    if options.peer:
        theirs = [b["seconds"] / n for *_, b in found]
        row |= {"peer_batch_s": statistics.median(theirs), **speedup(ours, theirs)}
    yield row


def decode(config, options, device, spec):
    """Yield a row per shape and dtype: the tokens/s after a prompt, the prompt's time included, and the MBU.

    MBU (model bandwidth utilisation) is the speed at which a token reads weights and KV cache, in bytes/s, as a
    fraction of the bandwidth of a copy.
    """
    for name, c in selected_configs(config, options, device, spec, "gpt2"):
        (prompt, n), dtypes = generation_lengths(c), dict.fromkeys(["float32", c.dtype])
        configs = [replace(c, dtype=dtype) for dtype in dtypes]
        with bench_processes("decode", configs, options.peer, 2**12) as processes:
            bandwidth = partial(copy_bandwidth, device)
            n, found = measure_alternating([p.turn for p in processes], n, options.repetitions, bandwidth)
        for i, c in enumerate(configs, 1):
            p = predict(c, spec)
            n_bytes = p["model"]["params_matmul"] * BYTES[operation_dtype("row product", c.dtype, device.type)]
            n_bytes += p["memory"]["kv_cache_per_token"] * (prompt + n // 2)
            ours, step_s = [figures[i]["seconds"] for figures in found], [figures[i]["step_s"] for figures in found]
            row = {
                "shape": name,
                "dtype": c.dtype,
                "tokens_per_s": n / statistics.median(ours),
                "seconds": statistics.median(ours),
                "spread": spread(ours),
                "prefill_s": statistics.median(figures[i]["prefill_s"] for figures in found),
                "step_s": statistics.median(step_s),
                "mbu": utilisation([n_bytes / s for s in step_s], [figures[0] for figures in found]),
            }
            if options.peer:
                theirs = [figures[-1]["seconds"] for figures in found]
                row |= {"peer_tokens_per_s": n / statistics.median(theirs), **speedup(ours, theirs)}
                row |= {"same_tokens": found[-1][i]["tokens"] == found[-1][-1]["tokens"]}
            yield row
