"""No network for any test of the data's; and small prepared data sets."""

import json
import socket

import numpy as np
import pytest

from config import Config


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Let no host but this machine be found."""
    found = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        if host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def corpus(tmp_path):
    """Return a function that writes a prepared data set and returns a config for it.

    Unless told otherwise, the ids are 0, 1, 2, ...: a window's first id is its offset.
    """

    def write(train=40, val=40, dtype="uint16", meta=True, **settings):
        splits = {}
        for name, ids in (("train", train), ("val", val)):
            ids = np.arange(ids) if isinstance(ids, int) else np.asarray(ids)
            (tmp_path / f"{name}.bin").write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            splits[name] = {"tokens": len(ids), "bytes": 2 * len(ids), "largest_id": int(ids.max(initial=0))}
        if meta:
            vocab_size = max(split["largest_id"] for split in splits.values()) + 1
            text = json.dumps({"dtype": dtype, "vocab_size": vocab_size, "tokenizer": {}, "splits": splits} | (
                meta if isinstance(meta, dict) else {}
            ))  # fmt: skip
            (tmp_path / "meta.json").write_text(text, encoding="utf-8")
        base = dict(block_size=4, batch_size=2, gradient_accumulation_steps=4, vocab_size=2**17, seed=1)
        return Config(dataset=str(tmp_path), **(base | settings))

    return write
