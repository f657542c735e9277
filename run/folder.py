"""A run's data and its folder: prepared, resumed from, or overwritten.

out_dir/config.py       the resolved settings
        metrics.jsonl   a line per step and per evaluation
        ledger.json     predicted, measured, ratio
        step_*/, latest, best   checkpoints (run/checkpoint.py)
"""

import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

from cli.errors import ConfigError, require
from config import ROOT, Architecture, dump
from run import checkpoint


def find_data(config):
    """Prepare the one corpus that needs no download, the standard library; any other must be there."""
    if config.dataset == "stdlib" and not (config.data_dir / "meta.json").exists():
        print("data/stdlib is not prepared yet: running python data/prepare.py stdlib", flush=True)
        done = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", "stdlib"], check=False)
        require(done.returncode == 0, "data/prepare.py stdlib failed; see its message above")
    require(
        (config.data_dir / "train.bin").exists(),
        f"{config.data_dir}: no prepared data there; python data/prepare.py {config.dataset} [--input=PATH ...] "
        "prepares it, and python train.py configs/quickstart.py needs none",
    )


def find_checkpoint(config, overwrite):
    """Return the checkpoint to resume from, or None; refuse to write over an earlier run unasked."""
    c, out_dir = config, Path(config.out_dir)
    known = c.init_from in ("scratch", "resume")
    require(known, f"init_from={c.init_from!r}: this version starts from scratch or resume; it reads no other weights")
    both = overwrite and c.init_from == "resume"
    require(not both, "--overwrite discards the earlier run, --init_from=resume continues it: choose one")
    if c.init_from == "scratch":
        free = overwrite or c.eval_only or not checkpoint.exists(out_dir)
        require(free, f"{out_dir} holds an earlier run: --init_from=resume continues it, --overwrite discards it")
        return None
    saved = checkpoint.load(out_dir)
    step, now = saved["state"]["step"], asdict(c)
    unfinished = step < c.max_iters or c.eval_only
    require(
        unfinished, f"{out_dir}: the run is at step {step} of max_iters={c.max_iters}; to continue, raise --max_iters"
    )
    changed = {name: old for name, old in saved["state"]["config"].items() if now.get(name) != old}
    architecture = {field.name for field in fields(Architecture)}
    shape = ", ".join(f"{name}={old!r}" for name, old in changed.items() if name in architecture)
    require(not shape, f"{out_dir}: the checkpoint was trained with {shape}; to resume, set the same")
    for name, old in changed.items():
        if name not in ("init_from", "out_dir", "device", "eval_only"):
            print(f"changed since the checkpoint: {name} was {old!r}, is {now[name]!r} from here on")
    return saved


def open_folder(config, overwrite):
    """Make the run's folder, with its resolved settings in it; to overwrite is to discard an earlier run's files first.

    Only the names that a run writes are removed: whatever else a user keeps there stays.
    """
    out_dir = Path(config.out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(out_dir.iterdir()) if overwrite else ():
            if path.is_dir() and re.fullmatch(r"step_\d{8}|\.step_\d{8}\.tmp", path.name):
                shutil.rmtree(path)
            elif path.name in ("latest", "best", "metrics.jsonl", "ledger.json"):
                path.unlink()
        text = dump(config, f"Resolved settings of the run in {out_dir}.")
        (out_dir / "config.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out_dir}: cannot be written ({error.strerror}); --out_dir names another folder") from None
