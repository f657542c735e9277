"""Run a training and record what it prints and measures: python -m benchmarks.record_run NAME -- CONFIG.py [flags]

The record is the folder records/NAME. It holds the run's config.py, metrics.jsonl and ledger.json, what the run printed
(stdout.txt), and record.json: commit, command, environment, seconds, losses, and the bits per byte that gzip and xz
need for the same validation text. The tests compare README.md with these files.
"""

import gzip
import json
import lzma
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.records import write_record
from cli.config_file import read_settings
from cli.errors import command, require
from cli.flags import load
from config import ROOT, Config
from data.tokenizer import Tokenizer
from hardware import machine

USAGE = "python -m benchmarks.record_run NAME -- CONFIG.py ..."


@dataclass(frozen=True)
class Options:
    """Run `python train.py CONFIG.py ...` and record what it prints and measures in records/NAME."""


@command
def main(argv):
    require(argv[:1] == ["--help"] or argv[1:2] == ["--"], f"write {USAGE}")
    name, arguments = argv[0], argv[2:] or ["--help"]
    config, _ = load(arguments, Config, Options, USAGE)
    folder = ROOT / "records" / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        out_dir = Path(temporary) / config.out_dir  # the record names the config's out_dir in place of this one
        lines, seconds = train(arguments, out_dir)
        lines = [line.replace(str(out_dir), config.out_dir).replace(f"{ROOT}/", "") for line in lines]
        for file in ("config.py", "metrics.jsonl", "ledger.json"):
            text = (out_dir / file).read_text(encoding="utf-8")
            (folder / file).write_text(text.replace(str(out_dir), config.out_dir), encoding="utf-8")
    (folder / "stdout.txt").write_text("".join(lines), encoding="utf-8")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    evaluations, steps = ([r for r in metrics if key in r] for key in ("val_loss", "loss"))
    environment = {
        "device": machine.local_cpu().name,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **{package: version(package) for package in ("torch", "numpy", "tiktoken")},
    }
    content = {
        "seconds": round(seconds, 1),
        "training_seconds": round(sum(r["step_s"] or 0 for r in steps), 1),
        "val_loss": evaluations[-1]["val_loss"],
        "val_bpb": evaluations[-1]["val_bpb"],
        **compressed(Config(**read_settings(folder / "config.py", Config))),
    }
    write_record(folder / "record.json", " ".join(["python", "train.py", *arguments]), environment, content)
    print(json.dumps(content, indent=1))


def train(arguments, out_dir):
    """Run train.py and print its lines as they come; return the lines and the seconds of the whole process."""
    start, lines = time.perf_counter(), []
    words = [sys.executable, "train.py", *arguments, f"--out_dir={out_dir}"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    require(process.returncode == 0, f"train.py ended with status {process.returncode}; nothing was recorded")
    return lines, time.perf_counter() - start


def compressed(config):
    """Return the bits per byte that `gzip -9` and `xz -9` need for the text of the validation split."""
    meta = json.loads((config.data_dir / "meta.json").read_text(encoding="utf-8"))
    tokenizer, ids = Tokenizer(meta["tokenizer"]), np.fromfile(config.data_dir / "val.bin", dtype=meta["dtype"])
    text = tokenizer.decode_bytes([i for i in ids.tolist() if i != tokenizer.eot])  # the text has no end tokens
    assert len(text) == meta["splits"]["val"]["bytes"]
    found = {"gzip_bpb": gzip.compress(text, 9), "xz_bpb": lzma.compress(text, preset=9)}
    return {name: 8 * len(data) / len(text) for name, data in found.items()}


if __name__ == "__main__":
    sys.exit(main())
