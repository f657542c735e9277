"""Corpora to prepare, and what is read back of them."""

import hashlib
import json

import numpy as np

from data.prepare import main
from data.tokenizer import Tokenizer

TRICKY = (
    "Hello, it's we'll 1234567 don't\n\n\n  def f(x):\r\n\treturn x;\n\n\n\nx.\n\n"
    "字。\n字字字、🙂🙂 é\u0301a \u3000 \x1c\x85_\n_ "
    + " " * 50 + "\n" * 50 + "a/\n//b\u00a0c!?\n" + "ſ's 'S İ١٢٣ ①② \x00<|endoftext|> \ufeff"
)  # fmt: skip


def write(folder, **documents):
    """Write documents (`a__b="text"` is a/b.txt) below folder and return it."""
    for name, text in documents.items():
        path = folder / (name.replace("__", "/") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return folder


def load(folder):
    """Return (meta, {split: ids}) of a prepared folder, having checked what meta.json says of the files."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    ids = {}
    for split in ("train", "val"):
        raw = (folder / f"{split}.bin").read_bytes()
        ids[split] = np.frombuffer(raw, np.dtype(meta["dtype"]).newbyteorder("<"))
        counts = meta["splits"][split]
        assert counts["sha256"] == hashlib.sha256(raw).hexdigest()
        assert counts["tokens"] == len(ids[split]) > 0
        assert counts["largest_id"] == ids[split].max() < meta["vocab_size"]
    tok = Tokenizer(meta["tokenizer"])
    assert meta["vocab_size"] == tok.vocab_size
    return meta, ids


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def error_of(capsys, *argv):
    """Return the one line with which a command line is refused."""
    assert main([str(word) for word in argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]
