"""The format of prepared data, which is a folder of three files. No other file of this project depends on the format.

    train.bin, val.bin   token ids and nothing else: uint16 or uint32, little-endian
    meta.json            vocab_size, dtype, the tokenizer's definition, and for each split its tokens, bytes, largest id

A folder that nanoGPT has prepared has no meta.json. Its .bin files are read as uint16 ids of GPT-2's vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from cli.errors import ConfigError, require

FORMAT = 1  # the version, to be raised if an older reader would misread the files
SPLITS = ("train", "val")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}  # name in meta.json -> numpy's name
GPT2_PADDED = 50304  # nanoGPT pads GPT-2's 50,257 tokens to a multiple of 64


@dataclass(frozen=True)
class Meta:
    """The content of meta.json. The counts of a split are {"tokens", "bytes", "largest_id"}; empty if unknown."""

    tokenizer: dict
    vocab_size: int
    dtype: str
    counts: dict[str, dict[str, int]]
    note: str | None = None


def read_meta(folder: Path, dataset: str) -> Meta:
    """Return the Meta of a prepared folder. `dataset` is its name in the command that prepares it."""
    prepare = f"run python data/prepare.py {dataset}"
    require(folder.is_dir(), f"{folder}: no such data set; {prepare}")
    file = folder / "meta.json"
    if file.exists():
        try:
            meta = json.loads(file.read_text(encoding="utf-8"))
            keys = ("tokens", "bytes", "largest_id")
            counts = {split: {key: int(meta["splits"][split][key]) for key in keys} for split in SPLITS}
            return Meta(meta["tokenizer"], int(meta["vocab_size"]), DTYPES[meta["dtype"]], counts)
        except (ValueError, KeyError, TypeError, OSError):
            raise ConfigError(f"{file}: not a readable meta.json; {prepare}") from None
    require(
        not (folder / "meta.pkl").exists(),
        f"{folder}: its vocabulary is in meta.pkl, which may run code and is not read; {prepare} --input=PATH",
    )
    gpt2 = {"kind": "tiktoken", "name": "gpt2"}
    note = f"{folder} has no meta.json: read as nanoGPT's uint16 with GPT-2's vocabulary"
    return Meta(gpt2, GPT2_PADDED, DTYPES["uint16"], {split: {} for split in SPLITS}, note)


def vocab_size_of(folder: Path, dataset: str) -> int:
    """Return the vocabulary size of prepared data, which is the default for the model."""
    prepared = (folder / "meta.json").exists() or (folder / "train.bin").exists()
    require(
        prepared,
        f"{folder}: no prepared data there, so vocab_size is unknown; run python data/prepare.py {dataset}, "
        "or set --vocab_size",
    )
    return read_meta(folder, dataset).vocab_size


def write_meta(file: Path, meta: dict):
    """Write meta.json with one key per line, so that people can read it."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"format": FORMAT, **meta}.items())
    file.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
