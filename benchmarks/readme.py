"""Write the parts of README.md that are read from records or printed by a command: python -m benchmarks.readme

A part lies between two markers, <!-- begin NAME --> and <!-- end -->; PARTS has the function that writes each. Nobody
types a figure into the README: after recording, run this command. A test checks that it would change nothing.
"""

import json
import re
import subprocess
import sys
import textwrap

from config import ROOT

README = ROOT / "README.md"
CORE = ["config.py", "data/loader.py", "model.py", "ops/loss.py", "optimizer.py", "trainer.py", "train.py",
        "run/checkpoint.py", "sample.py"]  # fmt: skip
PART = re.compile(r"<!-- begin (\w+) -->\n.*?<!-- end -->", re.S)
FIT = "python accounting.py configs/gpt2.py --gpu=rtx4090 --batch_size=64"


def main():
    text = README.read_text(encoding="utf-8")
    README.write_text(filled(text), encoding="utf-8")


def filled(text):
    """Return the README's text with each part written anew."""
    return PART.sub(lambda match: f"<!-- begin {match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->", text)


def record(name):
    return json.loads((ROOT / "records" / f"{name}.json").read_text(encoding="utf-8"))


def quickstart():
    """Return twelve lines of what the recorded quick start printed, and what it came to."""
    lines = (ROOT / "records" / "quickstart" / "stdout.txt").read_text(encoding="utf-8").splitlines()
    start = ("fits ", "time ", "MFU ", "FLOPs ", "step 1600/1600", "step 1600 | validation")
    last = ("predicted and measured", "      ", "  peak memory", "  FLOPs per step", "  step time", "  MFU")
    end = max(i for i, line in enumerate(lines) if line.startswith("predicted and measured"))
    shown = [next(line for line in lines if line.startswith(word)) for word in start]
    shown += [next(line for line in lines[end:] if line.startswith(word)) for word in last]
    r = record("quickstart/record")
    came_to = (
        f"It trained for {r['training_seconds']:.0f} seconds on {r['environment']['device']}, and ended at "
        f"{r['val_bpb']:.2f} bits per byte of validation text. For the same bytes `gzip -9` needs {r['gzip_bpb']:.2f}, "
        f"`xz -9` {r['xz_bpb']:.2f}."
    )
    return f"{block(shown)}\n\n{textwrap.fill(came_to, 120)}"


def fit():
    """Return the first and the last lines of accounting.py's answer for a config that does not fit."""
    done = subprocess.run([sys.executable, *FIT.split()[1:]], cwd=ROOT, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("remedies"))
    return block([f"$ {FIT}", *lines[:3], "...", *lines[start : start + 5]])


def nanogpt():
    """Return the table of comparisons with nanoGPT and with torch."""
    train, optimizer, loader, decode, prepare = (
        record(f"bench/{name}")["rows"] for name in ("train", "optimizer", "loader", "decode", "prepare")
    )
    learning = record("bench/learning")
    names = {"tiny": "4 layers of 128", "small": "6 layers of 384, vocabulary 50,304", "gpt2": "GPT-2 124M, batch 1"}
    rows = [
        (f"training, {names[r['shape']]}", f"{r['tokens_per_s']:,.0f} tokens/s, MFU {r['mfu']:.0%}",
         f"{r['ratio']:.2f} x as fast as nanoGPT, {r['memory_ratio']:.2f} x its memory")
        for r in train
    ]  # fmt: skip
    o, b, d, p = optimizer[0], loader[0], decode[0], prepare[0]
    rows += [
        ("a step of AdamW, 124M parameters", f"{o['step_s']:.3f} s",
         f"{o['ratio']:.2f} x as fast as torch's fused one"),
        ("a batch of 12 x 1,024 tokens", f"{1e6 * b['batch_s']:.0f} µs", f"{b['ratio']:.1f} x as fast as nanoGPT"),
        ("64 tokens after a prompt of 900, 124M", f"{d['seconds']:.1f} s", f"{d['ratio']:.0f} x as fast as nanoGPT"),
        (f"{p['text_bytes'] / 1e6:.0f} MB of text to GPT-2's tokens", f"{p['seconds']:.0f} s",
         f"{p['ratio']:.2f} x as fast as tiktoken alone"),
        ("Shakespeare by characters, three seeds", f"loss {learning['max_val_loss']:.3f} at most",
         f"nanoGPT's CPU run: {learning['min_peer_val_loss']:.3f}, in {1 / learning['max_ratio']:.1f} x the time"),
    ]  # fmt: skip
    device = record("bench/train")["environment"]["device"]
    table = ["| what | this trainer | compared |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*table, "", f"Measured on {device}, nanoGPT in float32 as its README runs it on a CPU."])


def core():
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in CORE}
    files = ", ".join(f"`{file}` {n}" for file, n in lines.items())
    return textwrap.fill(f"The core is {sum(lines.values()):,} lines, to be read in this order: {files}.", 120)


def block(lines):
    return "\n".join(["```", *lines, "```"])


PARTS = {"quickstart": quickstart, "fit": fit, "nanogpt": nanogpt, "core": core}


if __name__ == "__main__":
    sys.exit(main())
