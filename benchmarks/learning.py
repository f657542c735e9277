"""Compare what nanoGPT learns with what this trainer learns: python -m benchmarks.learning PATH

PATH is a nanoGPT checkout. Its data/shakespeare_char must be prepared, and ours too. The results are written to
records/bench/learning.json:

seeds   nanoGPT's CPU run of its README and our configs/shakespeare_fast.py are run one after the other, as users start
        them, once per seed (nanoGPT's own seed is fixed). A row has the seconds of both processes and the losses of
        both on the whole validation split, in windows of 64 tokens.
steps   nanoGPT's first 50 losses in float32, and ours from the same weights on the same batches.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.nanogpt import nanogpt_model, train_both
from benchmarks.records import RECORDS, git, write_record
from cli.config_file import read_settings
from cli.errors import command, require
from cli.flags import parse
from config import ROOT, Config, resolve
from data.loader import Dataset
from hardware.machine import local_cpu

SEEDS, STEPS = (1337, 1, 2), 50
CONFIG = ROOT / "configs" / "shakespeare_char.py"
README = [
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1",
    "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
    "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Compare what nanoGPT (the checkout in PATH) learns with what this trainer learns, on the CPU."""


@command
def main(argv):
    words, _ = parse(argv, (Options,), "python -m benchmarks.learning PATH")
    require(len(words) == 1, f"give the path of one nanoGPT checkout; got {' '.join(words) or 'none'}")
    path = Path(words[0]).resolve()
    content = {"steps": first_steps(path), "seeds": []}
    for seed in SEEDS:
        content["seeds"].append({"seed": seed} | run_both(path, seed))
        print(content["seeds"][-1], flush=True)
    for worst, key in ((max, "ratio"), (max, "val_loss"), (min, "peer_val_loss")):
        content[f"{worst.__name__}_{key}"] = worst(row[key] for row in content["seeds"])
    environment = {"device": local_cpu().name, "torch": torch.__version__, "peer": git(path, "rev-parse", "HEAD")}
    write_record(RECORDS / "learning.json", "python -m benchmarks.learning PATH", environment, content)


def run_both(path, seed):
    """Run both trainings from start to end; return the seconds, their ratio, and the losses."""
    with tempfile.TemporaryDirectory() as out:
        peer_s = training_seconds([*README, f"--out_dir={out}"], path)
        saved = torch.load(f"{out}/ckpt.pt", weights_only=True)
        peer_loss = validation_loss(path, saved["model"])
    with tempfile.TemporaryDirectory() as out:
        own_s = training_seconds(["configs/shakespeare_fast.py", f"--seed={seed}", f"--out_dir={out}"], ROOT)
        lines = map(json.loads, Path(out, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        loss = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    return {
        "seconds": round(own_s, 1), "peer_seconds": round(peer_s, 1), "ratio": round(own_s / peer_s, 3),
        "val_loss": loss, "peer_val_loss": peer_loss,
    }  # fmt: skip


def training_seconds(arguments, folder):
    """Run `python train.py` with the arguments in a folder; return the seconds of the whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "train.py", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


@torch.no_grad()
def validation_loss(path, weights):
    """Return the loss of nanoGPT's model on our whole validation split, which holds the same ids as nanoGPT's."""
    config = replace(Config(**read_settings(CONFIG, Config)), device="cpu")
    model = nanogpt_model(config, path)
    model.load_state_dict(weights)
    model.eval()
    total, n = 0.0, 0
    for x, y in Dataset(config).validation(config):
        total, n = total + model(x, y)[1].item() * len(x), n + len(x)
    return total / n


def first_steps(path):
    """Return nanoGPT's first losses in float32, ours, and the largest difference between the two."""
    own = Config(**read_settings(CONFIG, Config))
    config = resolve(replace(own, device="cpu", dtype="float32", seed=1337), local_cpu())
    theirs, ours = zip(*train_both(config, path, STEPS), strict=True)
    return {"peer": theirs, "ours": ours, "largest_difference": max(map(abs, map(float.__sub__, theirs, ours)))}


if __name__ == "__main__":
    sys.exit(main())
