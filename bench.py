"""Measure this machine: python bench.py COMMAND [CONFIG.py ...] [--name=value ...]

ceilings    what accounting.py reckons with: FLOP/s of matmuls by dtype and size, bandwidths, times of operations
"""

import json
import sys
from dataclasses import dataclass, replace

from config import Config, command, load, require, resolve


@dataclass(frozen=True)
class Options:
    """Measure this machine. ceilings: FLOP/s of matmuls, bandwidths, and the times of single operations, those of the
    config if one is named, else of a grid of shapes. All of it is kept in hardware.local.json.
    """

    json: bool = False  # print an object whose rows carry the same figures


COMMANDS = ("ceilings",)


def read_command(argv):
    """Return (command, config, options, whether a config was named), checked."""
    name = argv[0] if argv and not argv[0].startswith("-") else None
    config, options = load(argv[1:] if name else argv, Options)
    require(name in COMMANDS, f"a command is wanted: python bench.py {' | '.join(COMMANDS)}; got {name or 'none'}")
    return name, config, options, config != Config(device=config.device)


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    refused = command(lambda argv: read_command(argv) and None)()
    if refused:
        sys.exit(refused)

import torch

import hardware
from measure import copy_bandwidth, crossing_seconds, find_device, host_bandwidth, keep_freed_memory, matmul_flops
from schedule import schedule
from timing import not_timed, time_operations
from units import si

# Shapes from which those of other configs are estimated: width, heads, context, batch, vocabulary.
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


@command
def main(argv):
    name, config, options, named = read_command(argv)
    keep_freed_memory()
    device, record = find_device(config.device)
    rows = {"ceilings": ceilings}[name](config if named else None, device, record)
    if options.json:
        rows = list(rows)
        print(json.dumps({"command": name, "device": record.name, "torch": torch.__version__, "rows": rows}, indent=1))
        return 0
    print(f"{record.name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for row in rows:
        print(f"  {row['what']:<44}{si(row['value'], row['unit']):>16}", flush=True)
    return 0


def grid(record):
    """Yield small configs of many shapes."""
    for width, heads, context, batch, vocabulary in SIZES:
        shape = {"n_layer": 1, "n_head": heads, "n_embd": width, "block_size": context, "batch_size": batch}
        shape |= {"vocab_size": vocabulary, "gradient_accumulation_steps": 2}
        yield from (resolve(Config(**shape, **kind), record) for kind in KINDS)


def ceilings(config, device, record):
    """Yield what was measured, row by row, and keep it."""
    sizes = (256, 512, 1024, 2048) if device.type == "cpu" else (1024, 2048, 4096, 8192)
    peaks = {}
    for dtype in (dtype for dtype in ("float32", "bfloat16", "float16") if record.has_matmul(dtype)):
        for n in sizes:
            peaks[dtype] = matmul_flops(device, dtype, n)  # that of the largest stays
            yield {"what": f"matmul of {n} cubed, {dtype}", "value": peaks[dtype], "unit": "FLOP/s"}
    bandwidth = copy_bandwidth(device)
    yield {"what": "copy, bytes read and written", "value": bandwidth, "unit": "B/s"}
    crossing, link = crossing_seconds(device), None
    if crossing:
        yield {"what": "one core reading what another wrote, beyond its own", "value": crossing, "unit": "s/B"}
    if device.type == "cuda":
        for pinned in (False, True):
            link = host_bandwidth(device, pinned)
            yield {"what": f"host to device, {'pinned' if pinned else 'pageable'}", "value": link, "unit": "B/s"}
    found = {"peak_flops": peaks, "bandwidth": bandwidth}
    if device.type != "cpu":  # a vendor's figures stay what utilisation is a fraction of
        found = {"peak_flops": peaks | record.peak_flops, "bandwidth": record.bandwidth or bandwidth}
    source = f"measured here: matmul of {sizes[-1]} cubed" if record.source == "unknown" else record.source
    record = replace(record, **found, link=link, crossing=crossing, source=source, op_times={})
    configs = [resolve(config, record)] if config else grid(record)
    ops = not_timed([op for c in configs for op in schedule(c, record).ops], record)
    record = time_operations(ops.values(), device, record)
    hardware.write_local(record)
    yield {"what": "operations timed", "value": len(ops), "unit": ""}


if __name__ == "__main__":
    sys.exit(main())
