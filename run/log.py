"""The log of a run: a line per step on stdout, the same as JSON in metrics.jsonl, and the ledger in ledger.json."""

import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

from cli.files import replace_text
from cli.units import duration, mib
from measure.machine import raised_peak
from measure.memory import process_memory
from measure.step import counted_flops, profiled_peak
from run.ledger import compare, table

STEADY_STEPS = 5  # timed steps from which on their median is judged


class Log:
    """One line per step and per evaluation: JSON in out_dir/metrics.jsonl, a live line on a terminal.

    A resumed run drops the lines of the steps it repeats, so that none is there twice; the evaluation before its first
    step stays. Figures that are not finite are null in the file, since JSON has no word for them.
    The clock runs from begin_step to flush: evaluations, saves and anything else between a flush and the next
    begin_step are not timed.
    """

    def __init__(self, config, prediction: dict, device, spec, first_step: int):
        self.config, self.prediction, self.device, self.spec = config, prediction, device, spec
        self.live, self.wandb, self.out_dir = sys.stdout.isatty(), None, Path(config.out_dir)
        self.pending, self.clock, self.step_times = [], None, []
        self.measured = dict.fromkeys(("peak_bytes", "step_s", "checkpoint_bytes"))
        self.measured["flops_per_step"] = counted_flops(config)
        path = self.out_dir / "metrics.jsonl"
        path.write_text("".join(earlier_lines(path, first_step)), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")
        if config.wandb_log:
            import wandb  # an extra that most runs do without

            self.wandb = wandb.init(project=config.wandb_project, name=config.wandb_run_name)

    def begin_step(self):
        self.clock = self.clock or time.perf_counter()

    def end_step(self, figures: dict, timed: bool):
        """Take a step's figures as they are, on the device; they are read at the next flush."""
        self.pending.append((figures, timed))

    def profile(self, trainer, step: int, loader) -> dict:
        """Have the trainer take a step, and record its memory; return its figures."""
        peak, figures, curve = profiled_peak(lambda: trainer.step(step, loader), trainer.tensors(), self.device)
        self.measured |= {"peak_bytes": peak, "timeline": curve}
        return figures

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
            speed["mfu"] = self.mfu(step_s)
        speed["peak_source"] = self.prediction["time"]["peak_source"]
        memory = process_memory(self.device)
        for (figures, _), (loss, norm) in zip(self.pending, numbers, strict=True):
            self.write(figures | {"loss": loss, "grad_norm": norm} | speed | {"memory_bytes": memory})
            if not math.isfinite(norm):
                self.print_line(f"step {figures['step'] + 1}: its gradients are not finite, so the step was skipped")
        self.show(figures["step"], loss, figures["lr"], norm, speed, memory)
        self.pending, self.clock = [], None

    def mfu(self, step_s: float) -> float | None:
        """Return the MFU of a step; one that is faster than the peak shows that the peak is higher, and raises it."""
        time, attained = self.prediction["time"], self.prediction["flops"]["per_step"] / step_s
        if time["peak_flops"] is None:
            return None
        self.spec = raised_peak(self.spec, self.config.dtype, attained, "a training step")
        raised = self.spec.peak(self.config.dtype)
        time["mfu"] *= time["peak_flops"] / raised
        time |= {"peak_flops": raised, "peak_source": self.spec.source}
        return attained / raised

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

    def evaluation(self, step: int, val_loss: float, bits_per_byte: float | None):
        self.write({"step": step, "val_loss": val_loss, "val_bpb": bits_per_byte})
        self.print_line(f"step {step} | {evaluation_line(val_loss, bits_per_byte, self.config)}")

    def saved(self, folder: Path):
        """Say that a checkpoint was written, and keep its size for the ledger."""
        self.measured["checkpoint_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self.print_line(f"saved {folder}")

    def ledger(self, when: str, compiled: bool):
        """Print predicted against measured, and keep it in out_dir/ledger.json."""
        measured = self.measured
        measured["step_s"] = statistics.median(self.step_times) if self.step_times else None
        if self.device.type == "cpu":
            measured["resident_bytes"] = process_memory(self.device)
        rows = compare(self.prediction, measured, compiled, steady=len(self.step_times) >= STEADY_STEPS)
        note = "compiled: the predicted memory and time are an eager step's, upper bounds" if compiled else ""
        for line in table(rows, when, note):
            self.print_line(line)
        device = dataclasses.asdict(dataclasses.replace(self.spec, op_times={}))
        content = {"when": when, "note": note, "rows": rows, "device": device}
        content |= {"prediction": self.prediction, "measured": measured}
        replace_text(self.out_dir / "ledger.json", json.dumps(content, indent=1) + "\n")

    def write(self, line: dict):
        line = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in line.items()}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(line, step=line["step"])

    def print_line(self, text: str):
        """Print a line of its own, in place of the live one."""
        print(f"\r\x1b[K{text}" if self.live else text, flush=True)

    def close(self):
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def earlier_lines(path: Path, first_step: int) -> list[str]:
    """Return the lines of metrics.jsonl that a run from first_step on keeps; the last may be cut off by a kill."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if first_step and path.exists() else ():
        if line.endswith("\n"):
            entry = json.loads(line)
            kept += [line] if entry["step"] < first_step + ("val_loss" in entry) else []
    return kept


def evaluation_line(val_loss: float, bits_per_byte: float | None, config) -> str:
    bits = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte"
    sample = "the whole split" if config.eval_iters is None else f"a fixed sample of {config.eval_iters} batches"
    return f"validation loss {val_loss:.4f}{bits} ({sample})"
