"""Compare predictions with measurements while one dimension of a model grows: python -m benchmarks.growth

The base is one small model. Each of width, depth, context, batch and vocabulary is doubled three times while the others
stay as they are. For each of these configs, the operations are timed alone, and the step time is predicted from them.
Then the config is trained, and its median step time, its peak of tensor memory in a step, and its MFU are measured. The
figures are written to records/bench/growth.json.
"""

import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.ours import Training
from benchmarks.records import RECORDS, write_record
from benchmarks.turns import spread, write_tokens
from cli.errors import command, require
from cli.flags import parse
from config import Config, resolve
from estimate.predict import predict
from estimate.step import training_step
from measure.machine import cross_core_s_per_byte, find_device, with_measured_peak
from measure.memory import tune_allocator
from measure.operations import time_operations
from measure.step import profiled_peak

BASE = {"n_embd": 128, "n_layer": 2, "block_size": 128, "batch_size": 4, "vocab_size": 2048}
HEAD_DIM, ROUNDS, ROUND_S = 64, 5, 1.0


@dataclass(frozen=True)
class Options:
    """Compare predictions with measurements while width, depth, context, batch or vocabulary grows, on the CPU."""


@command
def main(argv):
    words, _ = parse(argv, (Options,), "python -m benchmarks.growth")
    require(not words, f"benchmarks.growth takes no arguments; got {' '.join(words)}")
    tune_allocator()
    device, spec = find_device("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), BASE["vocab_size"], 2**21)
        for axis, times in [("none", 1), *itertools.product(BASE, (2, 4, 8))]:
            shape = {name: value * (times if name == axis else 1) for name, value in BASE.items()}
            config = resolve(
                Config(**shape, n_head=shape["n_embd"] // HEAD_DIM, gradient_accumulation_steps=1, device="cpu",
                       dataset=folder, compile_optimizer=False), spec,
            )  # fmt: skip
            rows.append({"grown": axis, "times": times, **shape, **measure(config, device, spec)})
            print({k: v for k, v in rows[-1].items() if "ratio" in k or k in ("grown", "times")}, flush=True)
    environment = {"device": spec.name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    write_record(RECORDS / "growth.json", "python -m benchmarks.growth", environment, {"rows": rows})


def measure(config, device, spec):
    """Return the predicted and the measured figures of a config, and their ratios."""
    spec = with_measured_peak(spec, device, config.dtype)
    spec = time_operations(training_step(config, spec).ops, device, replace(spec, op_times={}))
    spec = replace(spec, cross_core_s_per_byte=cross_core_s_per_byte(device))
    p = predict(config, spec)
    training = Training(config)
    try:
        training.run(3)
        peak, *_ = profiled_peak(training.train_step, training.trainer.tensors(), device)
        rounds = []
        for _ in range(ROUNDS):
            start, n = time.perf_counter(), 0
            while not n or time.perf_counter() - start < ROUND_S:
                training.train_step()
                n += 1
            rounds.append((time.perf_counter() - start) / n)
    finally:
        training.loader.close()
    step_s, peak_flops = statistics.median(rounds), spec.peak(config.dtype)
    return {
        "parameters": p["model"]["params"],
        "predicted_step_s": p["time"]["step_s"], "step_s": step_s, "spread": spread(rounds),
        "step_ratio": step_s / p["time"]["step_s"],
        "predicted_peak_bytes": p["memory"]["peak"], "peak_bytes": peak, "peak_ratio": peak / p["memory"]["peak"],
        "predicted_mfu": p["time"]["mfu"], "mfu": p["flops"]["per_step"] / step_s / peak_flops,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
