"""Hold predicted step times against measured ones: python records/step_time.py

First the operations of three configs are timed, each in a process of its own (bench.py ceilings CONFIG), and then each
is trained for some steps in another, which predicts from what the first one kept. Then only a grid of shapes is timed,
none of them a shape of the last two configs, and those are trained. All of it thrice, as the machine changes between a
timing and a training; records/step_time.json has each case's median.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script sees only its own folder

import hardware
from bench import write_record

ROUNDS = 3
FEW = ["--gradient_accumulation_steps=1", "--dataset=stdlib", "--eval_iters=1", "--sample_tokens=0"]
CASES = {  # name -> (what was timed before, command line, steps)
    "quickstart": ("its operations", ["configs/quickstart.py"], 200),
    "gpt2, batch 1": ("its operations", ["configs/gpt2.py", "--vocab_size=50304", "--batch_size=1"], 10),
    "mlp": ("its operations", ["configs/mlp.py", "--vocab_size=4096"], 400),
    "5 heads of 64": ("a grid", ["configs/quickstart.py", "--n_head=5", "--n_embd=320", "--n_layer=6",
                                 "--block_size=192", "--batch_size=6"], 60),
    "llama-like, 9 heads of 48": ("a grid", ["configs/quickstart.py", "--n_head=9", "--n_embd=432", "--n_layer=3",
                                             "--activation=swiglu", "--block_size=320", "--batch_size=3"], 60),
}  # fmt: skip


def run(script, *arguments):
    subprocess.run([sys.executable, script, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main():
    found = {name: [] for name in CASES}
    for _ in range(ROUNDS):
        last = None
        for name, (before, arguments, steps) in CASES.items():
            length = [f"--max_iters={steps}", f"--eval_interval={steps}"]  # which decides whether AdamW is compiled
            if before == "its operations" or before != last:
                hardware.LOCAL_FILE.unlink(missing_ok=True)
                run("bench.py", "ceilings", *([*arguments, *FEW, *length] if before == "its operations" else []))
            last = before
            with tempfile.TemporaryDirectory() as out_dir:
                run("train.py", *arguments, *FEW, *length, f"--out_dir={out_dir}")
                ledger = json.loads((Path(out_dir) / "ledger.json").read_text(encoding="utf-8"))
            row = next(row for row in ledger["rows"] if row["figure"] == "step time")
            command = " ".join(["python train.py", *arguments, *FEW, *length])
            basis = ledger["prediction"]["time"]["basis"]
            found[name].append(row | {"timed before": before, "basis": basis, "command": command})
            print(f"{name:<28}{row['predicted']:>10.4f} s{row['measured']:>10.4f} s{row['ratio']:>8.3f}", flush=True)
    environment = {"device": hardware.local_cpu().name, "torch": version("torch")}
    rows = [{"case": name} | median(rounds) for name, rounds in found.items()]
    write_record(ROOT / "records" / "step_time.json", "python records/step_time.py", environment, {"rows": rows})


def median(rounds):
    """Return what all rounds share, the round with the median ratio, and all ratios."""
    middle = sorted(rounds, key=lambda row: row["ratio"])[len(rounds) // 2]
    keys = ("timed before", "basis", "command", "predicted", "measured", "ratio", "band", "within")
    return {key: middle[key] for key in keys} | {"ratios": [row["ratio"] for row in rounds]}


if __name__ == "__main__":
    main()
