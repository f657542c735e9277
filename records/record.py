"""Run a training, keep what it printed and measured: python records/record.py NAME -- CONFIG.py [--name=value ...]

Writes records/NAME/: record.json (commit, command, environment, time, losses, and what gzip and xz make of the same
validation bytes), stdout.txt, config.py, metrics.jsonl and ledger.json. The tests read the
README's figures from these files.
"""

import gzip
import json
import lzma
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
from bench import write_record
from config import Config, load, read_file
from tokenizer import Tokenizer


def main():
    name, dashes, *arguments = sys.argv[1:]
    assert dashes == "--", __doc__
    folder = ROOT / "records" / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        label = load(arguments)[0].out_dir  # the run itself goes elsewhere, but is shown where it would go
        out_dir = Path(temporary) / label
        start = time.perf_counter()
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
    environment = {
        "device": hardware.local_cpu().name,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **{package: version(package) for package in ("torch", "numpy", "tiktoken")},
    }
    content = {
        "seconds": round(seconds, 1),
        "training_seconds": round(sum(r["step_s"] or 0 for r in steps), 1),
        "val_loss": evaluations[-1]["val_loss"],
        "val_bpb": evaluations[-1]["val_bpb"],
        **compressed(config),
    }
    write_record(folder / "record.json", " ".join(["python", "train.py", *arguments]), environment, content)
    print(json.dumps(content, indent=1))


def compressed(config):
    """Return the bits per byte that `gzip -9` and `xz -9` need for the text of the validation split."""
    meta = json.loads((config.data_dir / "meta.json").read_text(encoding="utf-8"))
    tokenizer, ids = Tokenizer(meta["tokenizer"]), np.fromfile(config.data_dir / "val.bin", dtype=meta["dtype"])
    text = tokenizer.decode_bytes([i for i in ids.tolist() if i != tokenizer.eot])  # without the ends of documents
    assert len(text) == meta["splits"]["val"]["bytes"]
    found = {"gzip_bpb": gzip.compress(text, 9), "xz_bpb": lzma.compress(text, preset=9)}
    return {name: 8 * len(data) / len(text) for name, data in found.items()}


if __name__ == "__main__":
    sys.exit(main())
