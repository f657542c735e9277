"""The log of a run (stdout, metrics.jsonl) and its ledger: what was predicted, what was measured, their ratio."""

import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

from measure import process_memory
from units import duration, mib, si

# What a predicted time rests on -> what to suspect where the measured one is outside its band.
TIME = {
    "assumed": "the assumed MFU (--mfu) is not what this machine reaches",
    "estimated": "operations of other shapes were timed; python bench.py ceilings CONFIG times these",
    "timed": "the machine is busier, or idler, than when its operations were timed",
}
# Each figure's unit, how far measured / predicted may be from 1, and what to suspect where it is further.
FIGURES = {
    "peak memory": ("bytes", 0.05, "an operation keeps or makes what schedule.py does not know"),
    "FLOPs per step": ("FLOPs", 0.0, "the schedule's matmuls are not the model's"),
    "step time": ("s", None, None),  # as the prediction's time says of itself
    "tokens/s": ("tokens/s", None, None),
    "MFU": ("fraction", None, None),
    "checkpoint": ("bytes", 0.05, "more is saved than weights and moments"),
}
SCRATCH = 2**16  # bytes: file headers, a matmul's scratch memory; below it no ratio of a tiny model says anything


class Log:
    """One line per step and per evaluation: JSON in out_dir/metrics.jsonl, a live line on a terminal.

    A resumed run drops the lines of the steps it makes again, so that none is there twice; the evaluation before its
    first step stays. Figures that are not finite are null in the file, since JSON has no word for them.
    The clock runs from begin_step to flush; evaluating, saving and whatever else stands between a flush and a
    begin_step is not in it.
    """

    def __init__(self, config, prediction: dict, device, record, first_step: int):
        self.config, self.prediction, self.device, self.record = config, prediction, device, record
        self.live, self.wandb, self.out_dir = sys.stdout.isatty(), None, Path(config.out_dir)
        self.pending, self.clock, self.step_times = [], None, []
        path = self.out_dir / "metrics.jsonl"
        kept = []
        if first_step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # the last one may be cut off by a kill
                    record = json.loads(line)
                    kept += [line] if record["step"] < first_step + ("val_loss" in record) else []
        path.write_text("".join(kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")
        if config.wandb_log:
            import wandb  # an extra that most runs do without

            self.wandb = wandb.init(project=config.wandb_project, name=config.wandb_run_name)

    def begin_step(self):
        self.clock = self.clock or time.perf_counter()

    def end_step(self, figures: dict, timed: bool):
        """Take a step's figures as they are, on the device; they are read at the next flush."""
        self.pending.append((figures, timed))

    def flush(self):
        """Wait for the device, and log the steps since the last flush."""
        if not self.pending:
            return
        numbers = torch.stack([torch.stack((f["loss"], f["grad_norm"])) for f, _ in self.pending]).tolist()  # waits
        elapsed = (time.perf_counter() - self.clock) / len(self.pending)
        step_s = elapsed if all(timed for _, timed in self.pending) else None
        speed = {"step_s": step_s, "tokens_per_s": None, "mfu": None}
        if step_s:
            self.step_times += [step_s] * len(self.pending)
            speed["tokens_per_s"] = self.config.tokens_per_step / step_s
            peak = self.prediction["time"]["peak_flops"]
            speed["mfu"] = self.prediction["flops"]["per_step"] / (step_s * peak) if peak else None
        speed["peak_source"] = self.prediction["time"]["peak_source"]
        memory = process_memory(self.device)
        for (figures, _), (loss, norm) in zip(self.pending, numbers, strict=True):
            self.write(figures | {"loss": loss, "grad_norm": norm} | speed | {"memory_bytes": memory})
            if not math.isfinite(norm):
                self.say(f"step {figures['step'] + 1}: its gradients are not finite, so it changed nothing")
        self.show(figures["step"], loss, figures["lr"], norm, speed, memory)
        self.pending, self.clock = [], None

    def show(self, step, loss, lr, norm, speed, memory):
        c, rate = self.config, "warming up"
        if speed["step_s"]:
            mfu = "n/a" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
            left = duration(speed["step_s"] * (c.max_iters - 1 - step))
            rate = f"{speed['tokens_per_s']:,.0f} tokens/s | MFU {mfu} | {left} left"
        line = (
            f"step {step + 1}/{c.max_iters} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.2f} | {mib(memory)} | {rate}"
        )
        print(f"\r\x1b[K{line}" if self.live else line, end="" if self.live else "\n", flush=True)

    def evaluation(self, step: int, val_loss: float, dataset, config):
        bpb = dataset.bits_per_byte(val_loss)
        self.write({"step": step, "val_loss": val_loss, "val_bpb": bpb})
        self.say(f"step {step} | {evaluation_line(val_loss, bpb, config)}")

    def ledger(self, measured: dict, when: str, compiled: bool):
        """Print predicted against measured, and keep it in out_dir/ledger.json."""
        rows = compare(self.prediction, measured, compiled)
        note = "compiled: the predicted memory and time are an eager step's, upper bounds" if compiled else ""
        for line in table(rows, when, note):
            self.say(line)
        if self.device.type == "cpu":
            resident = measured["resident_bytes"] = process_memory(self.device)
            self.say(f"  {'resident':<16} {'':>12} {mib(resident):>12}           the process, torch and all")
        device = dataclasses.asdict(dataclasses.replace(self.record, op_times={}))
        content = {"when": when, "note": note, "rows": rows, "device": device}
        content |= {"prediction": self.prediction, "measured": measured}
        (self.out_dir / "ledger.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def median_step_s(self):
        return statistics.median(self.step_times) if self.step_times else None

    def write(self, record: dict):
        record = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in record.items()}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(record, step=record["step"])

    def say(self, text: str):
        """Print a line of its own, in place of the live one."""
        print(f"\r\x1b[K{text}" if self.live else text, flush=True)

    def close(self):
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def evaluation_line(val_loss: float, bpb: float | None, config) -> str:
    bits = "" if bpb is None else f", {bpb:.4f} bits per byte"
    sample = "the whole split" if config.eval_iters is None else f"a fixed sample of {config.eval_iters} batches"
    return f"validation loss {val_loss:.4f}{bits} ({sample})"


def compare(prediction: dict, measured: dict, compiled: bool = False) -> list[dict]:
    """Return a row per figure: predicted, measured, their ratio, and whether that lies in the figure's band.

    `measured` has peak_bytes, flops_per_step, step_s and checkpoint_bytes; what was not measured is None and makes no
    row. What is predicted for a compiled step is an eager step's memory and time, upper bounds: to need less is within.
    """
    memory, flops, time, step_s = (*(prediction[key] for key in ("memory", "flops", "time")), measured["step_s"])
    attained = step_s and flops["per_step"] / step_s
    pairs = {
        "peak memory": (memory["peak"], measured["peak_bytes"]),
        "FLOPs per step": (flops["hardware_per_step"], measured["flops_per_step"]),
        "step time": (time["step_s"], step_s),
        "tokens/s": (time["tokens_per_s"], step_s and flops["tokens_per_step"] / step_s),
        "MFU": (time["mfu"], attained and time["peak_flops"] and attained / time["peak_flops"]),
        "checkpoint": (memory["checkpoint"], measured["checkpoint_bytes"]),
    }
    rows = []
    for figure, (predicted, found) in pairs.items():
        if predicted is not None and found is not None:
            unit, band, suspect = FIGURES[figure]
            if band is None:
                band, suspect = time["band"], TIME[time["basis"]]
            ratio = found / predicted
            near = abs(ratio - 1) <= band or (unit == "bytes" and abs(found - predicted) < SCRATCH)
            better = ratio > 1 if figure in ("tokens/s", "MFU") else ratio < 1
            within = near or (compiled and better and figure not in ("FLOPs per step", "checkpoint"))
            rows.append({"figure": figure, "predicted": predicted, "measured": found, "unit": unit, "ratio": ratio,
                         "band": band, "within": within, "suspect": suspect})  # fmt: skip
    return rows


SHOW = {
    "bytes": mib,
    "FLOPs": lambda n: si(n, "FLOP"),
    "s": duration,
    "tokens/s": lambda n: f"{n:,.0f}",
    "fraction": lambda x: f"{x:.1%}",
}


def table(rows: list[dict], when: str, note: str):
    """Yield the ledger, line by line."""
    yield f"ledger {when}{f' ({note})' if note else ''}"
    yield f"  {'':<16} {'predicted':>12} {'measured':>12} {'ratio':>8}"
    for row in rows:
        predicted, found = (SHOW[row["unit"]](row[key]) for key in ("predicted", "measured"))
        verdict = "" if row["within"] else f"  outside 1 ± {row['band']:g}: {row['suspect']}"
        yield f"  {row['figure']:<16} {predicted:>12} {found:>12} {row['ratio']:>8.3f}{verdict}"
