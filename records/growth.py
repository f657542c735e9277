"""Hold prediction against measurement while one thing grows: python records/growth.py

From one small model, width, depth, context, batch and vocabulary are doubled three times each, the rest left as it is.
Each configuration's operations are timed alone, which predicts its step; then it is trained: the median of its steps,
the most memory that tensors take in one of them, and MFU. Writes records/bench/growth.json.
"""

import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script sees only its own folder

from bench import write_record
from config import Config, resolve
from measure import crossing_seconds, find_device, keep_freed_memory, profiled_peak, standing_bytes, with_ceiling
from peer import Training, spread, write_tokens
from prediction import predict
from schedule import schedule
from timing import time_operations

BASE = {"n_embd": 128, "n_layer": 2, "block_size": 128, "batch_size": 4, "vocab_size": 2048}
HEAD_DIM, ROUNDS, ROUND_S = 64, 5, 1.0


def main():
    keep_freed_memory()
    device, record = find_device("cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), BASE["vocab_size"], 2**21)
        for axis, times in [("none", 1), *itertools.product(BASE, (2, 4, 8))]:
            shape = {name: value * (times if name == axis else 1) for name, value in BASE.items()}
            config = resolve(
                Config(**shape, n_head=shape["n_embd"] // HEAD_DIM, gradient_accumulation_steps=1, device="cpu",
                       dataset=folder, compile_optimizer=False), record,
            )  # fmt: skip
            rows.append({"grown": axis, "times": times, **shape, **one(config, device, record)})
            print({k: v for k, v in rows[-1].items() if "ratio" in k or k in ("grown", "times")}, flush=True)
    environment = {"device": record.name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    write_record(ROOT / "records" / "bench" / "growth.json", "python records/growth.py", environment, {"rows": rows})


def one(config, device, record):
    """Return a row: what is predicted, what is measured, and the ratios."""
    record = with_ceiling(record, device, config.dtype)
    record = time_operations(schedule(config, record).ops, device, replace(record, op_times={}))
    record = replace(record, crossing=crossing_seconds(device))
    p = predict(config, record)
    training = Training(config)
    try:
        training.run(3)
        trainer = training.trainer
        alive = [*trainer.model.parameters(), *trainer.model.buffers(), *itertools.chain(*trainer.optimizer.state())]
        peak, *_ = profiled_peak(training.train_step, standing_bytes(alive), device)
        rounds = []
        for _ in range(ROUNDS):
            start, n = time.perf_counter(), 0
            while not n or time.perf_counter() - start < ROUND_S:
                training.train_step()
                n += 1
            rounds.append((time.perf_counter() - start) / n)
    finally:
        training.loader.close()
    step_s, peak_flops = statistics.median(rounds), record.peak(config.dtype)
    return {
        "parameters": p["model"]["params"],
        "predicted_step_s": p["time"]["step_s"], "step_s": step_s, "spread": spread(rounds),
        "step_ratio": step_s / p["time"]["step_s"],
        "predicted_peak_bytes": p["memory"]["peak"], "peak_bytes": peak, "peak_ratio": peak / p["memory"]["peak"],
        "predicted_mfu": p["time"]["mfu"], "mfu": p["flops"]["per_step"] / step_s / peak_flops,
    }  # fmt: skip


if __name__ == "__main__":
    main()
