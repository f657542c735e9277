"""What nanoGPT learns and what this trainer does, in turns: python records/beside_nanogpt.py PATH

PATH is a nanoGPT checkout with its data/shakespeare_char prepared; ours must be prepared too. Two things are written to
records/bench/learning.json:

seeds   the CPU run of its README (whose seed is fixed) and configs/shakespeare_fast.py, one after the other, thrice,
        as users start them: seconds of the whole process, and the loss of the whole validation split in windows
        of 64
steps   its first 50 losses in float32, and ours of the same weights on the same batches
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script sees only its own folder

from bench import git, write_record
from config import load, resolve
from data.loader import Dataset
from hardware import local_cpu
from peer import follow, peer_model

SEEDS, STEPS = (1337, 1, 2), 50
README = [
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1",
    "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
    "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip


def main():
    assert len(sys.argv) == 2, __doc__
    path = Path(sys.argv[1]).resolve()
    content = {"steps": first_steps(path), "seeds": []}
    for seed in SEEDS:
        content["seeds"].append({"seed": seed} | beside(path, seed))
        print(content["seeds"][-1], flush=True)
    for worst, key in ((max, "ratio"), (max, "val_loss"), (min, "peer_val_loss")):
        content[f"{worst.__name__}_{key}"] = worst(row[key] for row in content["seeds"])
    environment = {"device": local_cpu().name, "torch": torch.__version__, "peer": git(path, "rev-parse", "HEAD")}
    file = ROOT / "records" / "bench" / "learning.json"
    write_record(file, "python records/beside_nanogpt.py PATH", environment, content)


def beside(path, seed):
    """Run both from start to end; return seconds, their ratio, and losses."""
    with tempfile.TemporaryDirectory() as out:
        peer_s = seconds([*README, f"--out_dir={out}"], path)
        saved = torch.load(f"{out}/ckpt.pt", weights_only=True)
        peer_loss = whole_split(path, saved["model"])
    with tempfile.TemporaryDirectory() as out:
        own_s = seconds(["configs/shakespeare_fast.py", f"--seed={seed}", f"--out_dir={out}"], ROOT)
        lines = map(json.loads, Path(out, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        loss = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    return {
        "seconds": round(own_s, 1), "peer_seconds": round(peer_s, 1), "ratio": round(own_s / peer_s, 3),
        "val_loss": loss, "peer_val_loss": peer_loss,
    }  # fmt: skip


def seconds(arguments, folder):
    start = time.perf_counter()
    subprocess.run([sys.executable, "train.py", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


@torch.no_grad()
def whole_split(path, weights):
    """Return the loss of the peer's model on our validation split, which holds the same ids."""
    config, _ = load([str(ROOT / "configs" / "shakespeare_char.py"), "--device=cpu"])
    model = peer_model(config, path)
    model.load_state_dict(weights)
    model.eval()
    total, n = 0.0, 0
    for x, y in Dataset(config).validation(config):
        total, n = total + model(x, y)[1].item() * len(x), n + len(x)
    return total / n


def first_steps(path):
    """Return its first losses in float32, ours, and by how much they differ at most."""
    flags = ["--device=cpu", "--dtype=float32", "--seed=1337"]
    config = resolve(load([str(ROOT / "configs" / "shakespeare_char.py"), *flags])[0], local_cpu())
    theirs, ours = zip(*follow(config, path, STEPS), strict=True)
    return {"peer": theirs, "ours": ours, "largest_difference": max(map(abs, map(float.__sub__, theirs, ours)))}


if __name__ == "__main__":
    sys.exit(main())
