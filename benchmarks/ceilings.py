"""Measures the figures that accounting.py predicts with: FLOP/s of matmuls, bandwidths, times of operations."""

from dataclasses import replace

from config import Config, resolve
from estimate.step import training_step
from hardware import machine
from measure.machine import copy_bandwidth, cross_core_s_per_byte, host_bandwidth, matmul_flops
from measure.operations import not_timed, time_operations

# Times of other shapes are estimated from those of these: width, heads, context, batch, vocabulary.
SIZES = [
    (64, 4, 64, 4, 65), (128, 4, 128, 8, 256), (256, 4, 256, 4, 4096), (384, 6, 256, 8, 1000),
    (512, 8, 512, 2, 16384), (768, 12, 1024, 1, 50304),
]  # fmt: skip
KINDS = [
    {},
    {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    {"norm": "rmsnorm", "pos": "rope", "activation": "relu2", "qk_norm": True, "dropout": 0.1, "tie_weights": False},
    {"model": "mlp"},
]


def grid(spec):
    """Yield one config of one layer for each of SIZES and KINDS."""
    for width, heads, context, batch, vocabulary in SIZES:
        shape = {"n_layer": 1, "n_head": heads, "n_embd": width, "block_size": context, "batch_size": batch}
        shape |= {"vocab_size": vocabulary, "gradient_accumulation_steps": 2}
        yield from (resolve(Config(**shape, **kind), spec) for kind in KINDS)


def ceilings(config, options, device, spec):
    """Yield each figure as a row when it has been measured; at the end write all of them to hardware.local.json.

    The operations timed are those of the config, or of the grid if config is None.
    """
    sizes = (256, 512, 1024, 2048) if device.type == "cpu" else (1024, 2048, 4096, 8192)
    peaks = {}
    for dtype in (dtype for dtype in ("float32", "bfloat16", "float16") if spec.has_matmul(dtype)):
        for n in sizes:
            peaks[dtype] = matmul_flops(device, dtype, n)  # the largest n comes last, and its value is kept
            yield {"what": f"matmul of {n} cubed, {dtype}", "value": peaks[dtype], "unit": "FLOP/s"}
    bandwidth = copy_bandwidth(device)
    yield {"what": "copy, bytes read and written", "value": bandwidth, "unit": "B/s"}
    cross_core, link = cross_core_s_per_byte(device), None
    if cross_core:
        yield {"what": "cross-core read, additional time", "value": cross_core, "unit": "s/B"}
    if device.type == "cuda":
        for pinned in (False, True):
            link = host_bandwidth(device, pinned)
            yield {"what": f"host to device, {'pinned' if pinned else 'pageable'}", "value": link, "unit": "B/s"}
    found = {"peak_flops": peaks, "bandwidth": bandwidth}
    if device.type != "cpu":  # utilisation is a fraction of the vendor's figures where they are known
        found = {"peak_flops": peaks | spec.peak_flops, "bandwidth": spec.bandwidth or bandwidth}
    source = f"measured here: matmul of {sizes[-1]} cubed" if spec.source == "unknown" else spec.source
    spec = replace(spec, **found, link=link, cross_core_s_per_byte=cross_core, source=source, op_times={})
    configs = [resolve(config, spec)] if config else grid(spec)
    ops = not_timed([op for c in configs for op in training_step(c, spec).ops], spec)
    spec = time_operations(ops.values(), device, spec)
    machine.write_local(spec)
    yield {"what": "operations timed", "value": len(ops), "unit": ""}
