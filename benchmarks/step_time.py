"""Compare predicted step times with measured ones: python -m benchmarks.step_time

For each of three configs, `python -m benchmarks ceilings CONFIG` times the config's operations in a process of its own.
Then train.py, in another process, predicts the step time from these times and trains the config for some steps.

For two more configs, only a grid of shapes is timed, which contains none of their shapes. Then both are trained.

The speed of a machine changes between a timing and a training. Everything is therefore measured three times, and
records/step_time.json holds the median of each config.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.records import write_record
from cli.errors import command, require
from cli.flags import parse
from config import ROOT
from hardware import machine

ROUNDS = 3
SHORT = ["--gradient_accumulation_steps=1", "--dataset=stdlib", "--eval_iters=1", "--sample_tokens=0"]
CASES = {  # name -> (what is timed before the training, command line, steps)
    "quickstart": ("its operations", ["configs/quickstart.py"], 200),
    "gpt2, batch 1": ("its operations", ["configs/gpt2.py", "--vocab_size=50304", "--batch_size=1"], 10),
    "mlp": ("its operations", ["configs/mlp.py", "--vocab_size=4096"], 400),
    "5 heads of 64": ("a grid", ["configs/quickstart.py", "--n_head=5", "--n_embd=320", "--n_layer=6",
                                 "--block_size=192", "--batch_size=6"], 60),
    "llama-like, 9 heads of 48": ("a grid", ["configs/quickstart.py", "--n_head=9", "--n_embd=432", "--n_layer=3",
                                             "--activation=swiglu", "--block_size=320", "--batch_size=3"], 60),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Compare predicted step times with measured ones. It replaces the times kept in hardware.local.json."""


def run(*arguments):
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@command
def main(argv):
    words, _ = parse(argv, (Options,), "python -m benchmarks.step_time")
    require(not words, f"benchmarks.step_time takes no arguments; got {' '.join(words)}")
    found = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        last = None
        for name, (timed, arguments, steps) in CASES.items():
            # AdamW is compiled only in long runs, so the timed and the trained config must have the same length.
            arguments = [*arguments, *SHORT, f"--max_iters={steps}", f"--eval_interval={steps}"]
            if timed == "its operations" or timed != last:
                machine.LOCAL_FILE.unlink(missing_ok=True)
                run("-m", "benchmarks", "ceilings", *(arguments if timed == "its operations" else []))
            last = timed
            with tempfile.TemporaryDirectory() as out_dir:
                run("train.py", *arguments, f"--out_dir={out_dir}")
                ledger = json.loads((Path(out_dir) / "ledger.json").read_text(encoding="utf-8"))
            row = next(row for row in ledger["rows"] if row["figure"] == "step time")
            basis, typed = ledger["prediction"]["time"]["basis"], " ".join(["python train.py", *arguments])
            found[name].append(row | {"timed before": timed, "basis": basis, "command": typed})
            print(f"{name:<28}{row['predicted']:>10.4f} s{row['measured']:>10.4f} s{row['ratio']:>8.3f}", flush=True)
    environment = {"device": machine.local_cpu().name, "torch": version("torch")}
    rows = [{"case": name} | median(rounds) for name, rounds in found.items()]
    write_record(ROOT / "records" / "step_time.json", "python -m benchmarks.step_time", environment, {"rows": rows})


def median(rounds):
    """Return the figures of the round whose ratio is the median, and the ratios of all rounds."""
    middle = sorted(rounds, key=lambda row: row["ratio"])[len(rounds) // 2]
    keys = ("timed before", "basis", "command", "predicted", "measured", "ratio", "band", "within")
    return {key: middle[key] for key in keys} | {"ratios": [row["ratio"] for row in rounds]}


if __name__ == "__main__":
    sys.exit(main())
