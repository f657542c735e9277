"""Run a training, keep what it printed and measured: python records/record.py NAME -- CONFIG.py [--name=value ...]

Writes records/NAME/: record.json (commit, command, environment, time, losses, and what gzip makes of the same
validation bytes where tokens are bytes), stdout.txt, config.py, metrics.jsonl and ledger.json. The tests read the
README's figures from these files.
"""

import gzip
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script sees only its own folder

import hardware
from config import Config, load, read_file


def main():
    name, dashes, *arguments = sys.argv[1:]
    assert dashes == "--", __doc__
    folder = ROOT / "records" / name
    folder.mkdir(parents=True, exist_ok=True)
    changed = git("status", "--porcelain", "--", "*.py")
    with tempfile.TemporaryDirectory() as temporary:
        label = load(arguments)[0].out_dir  # the run itself goes elsewhere, but is shown where it would go
        out_dir = Path(temporary) / label
        started, start = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), time.perf_counter()
        command = [sys.executable, "train.py", *arguments, f"--out_dir={out_dir}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.replace(str(out_dir), label).replace(str(ROOT) + "/", ""))
        assert process.wait() == 0, "the run failed"
        seconds = time.perf_counter() - start
        for file in ("config.py", "metrics.jsonl", "ledger.json"):
            text = (out_dir / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace(str(out_dir), label), encoding="utf-8")
        evaluations = [
            r for r in map(json.loads, (out_dir / "metrics.jsonl").open(encoding="utf-8")) if "val_loss" in r
        ]
        steps = [r for r in map(json.loads, (out_dir / "metrics.jsonl").open(encoding="utf-8")) if "loss" in r]
    (folder / "stdout.txt").write_text("".join(lines), encoding="utf-8")
    config = Config(**read_file(folder / "config.py"))
    record = {
        "commit": git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else ""),
        "command": " ".join(["python", "train.py", *arguments]),
        "environment": {
            "device": hardware.local_cpu().name,
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            **{package: version(package) for package in ("torch", "numpy", "tiktoken")},
        },
        "started": started,
        "seconds": round(seconds, 1),
        "training_seconds": round(sum(r["step_s"] or 0 for r in steps), 1),
        "val_loss": evaluations[-1]["val_loss"],
        "val_bpb": evaluations[-1]["val_bpb"],
        "gzip_bpb": gzip_bits_per_byte(config),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


def gzip_bits_per_byte(config):
    """Return what `gzip -9` needs for the validation split, bits per byte; None where tokens are not bytes."""
    meta = json.loads((config.data_dir / "meta.json").read_text(encoding="utf-8"))
    if meta["tokenizer"] != {"kind": "byte"}:
        return None
    tokens = np.fromfile(config.data_dir / "val.bin", dtype=meta["dtype"])
    text = tokens[tokens < 256].astype(np.uint8).tobytes()  # without the ends of documents
    assert len(text) == meta["splits"]["val"]["bytes"]
    return 8 * len(gzip.compress(text, 9)) / len(text)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
