"""What the tests of training runs share: tiny settings, a small corpus, and how a run's files are read and compared."""

import json

import numpy as np
import torch

from run import checkpoint

PEAK = 1e11  # FLOP/s that these tests take their device to have
TINY = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 4, "gradient_accumulation_steps": 1,
    "compile_optimizer": False, "max_iters": 4, "warmup_iters": 2, "lr_decay_iters": 20, "learning_rate": 1e-3,
    "min_lr": 1e-4, "eval_interval": 100, "eval_iters": 2, "device": "cpu", "dtype": "float32", "sample_tokens": 0,
}  # fmt: skip
RESUMED = {"dropout": 0.2, "grad_clip": 0.1, "gradient_accumulation_steps": 2, "batch_size": 2}
STEP_KEYS = {
    "step", "loss", "lr", "grad_norm", "step_s", "data_wait_s", "tokens_per_s", "mfu", "peak_source", "memory_bytes",
}  # fmt: skip


def write_data(folder, train_ids, val_ids, tokenizer, vocab_size):
    """Write ids as a prepared corpus."""
    folder.mkdir(parents=True)
    splits = {}
    for split, ids in (("train", train_ids), ("val", val_ids)):
        ids = np.asarray(ids, dtype="<u2")
        ids.tofile(folder / f"{split}.bin")
        splits[split] = {"tokens": len(ids), "bytes": 2 * len(ids), "largest_id": int(ids.max())}
    meta = {"format": 1, "dtype": "uint16", "vocab_size": vocab_size, "tokenizer": tokenizer, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def letters(n):
    """Return n ids, a reproducible walk through the letters: text that is neither constant nor noise."""
    steps = np.random.default_rng(0).integers(1, 4, n)
    return 97 + np.cumsum(steps) % 26


def read_metrics(out_dir):
    """Return the step lines and the evaluation lines of a run, each in their order."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    return [r for r in records if "loss" in r], [r for r in records if "val_loss" in r]


def assert_same_run(a, b):
    """Check that two runs ended with the same bits: weights, moments and each figure of each step."""
    first, second = checkpoint.load(a), checkpoint.load(b)
    assert first["state"]["step"] == second["state"]["step"]
    assert first["state"]["best_val_loss"] == second["state"]["best_val_loss"]
    for part in ("weights", "optimizer"):
        assert first[part].keys() == second[part].keys()
        for name, tensor in first[part].items():
            assert torch.equal(tensor, second[part][name]), name
    for some, others in zip(read_metrics(a), read_metrics(b), strict=True):
        keep = ("step", "loss", "lr", "grad_norm", "val_loss", "val_bpb")
        assert [{k: r[k] for k in keep if k in r} for r in some] == [{k: r[k] for k in keep if k in r} for r in others]


def files_and_times(folder):
    """Return when each path below a folder was last written, to see that nothing was touched."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
