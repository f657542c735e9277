"""What meta.json must say, what a folder without one is taken for, and what is read is what was written."""

import json

import numpy as np
import pytest

from cli.errors import ConfigError
from data.format import DTYPES, FORMAT, Meta, read_meta, vocab_size_of, write_meta
from data.loader import Dataset


def refused(ask, *arguments):
    """Return the one line with which a folder is refused."""
    with pytest.raises(ConfigError) as caught:
        ask(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_read_is_what_was_written(tmp_path):
    counts = {
        "train": {"tokens": 90, "bytes": 200, "largest_id": 64},
        "val": {"tokens": 10, "bytes": 20, "largest_id": 63},
    }
    tokenizer = {"kind": "char", "chars": "é字🙂"}
    more = {split: counts[split] | {"sha256": "abc", "documents": 3} for split in counts}
    for dtype, spelled in DTYPES.items():
        meta = {"vocab_size": 65, "dtype": dtype, "tokenizer": tokenizer, "splits": more, "val_fraction": 0.1}
        write_meta(tmp_path / "meta.json", meta)
        assert read_meta(tmp_path, "mine") == Meta(tokenizer, 65, spelled, counts)
        assert vocab_size_of(tmp_path, "mine") == 65
        text = (tmp_path / "meta.json").read_text(encoding="utf-8")
        assert json.loads(text) == {"format": FORMAT, **meta} and len(text.splitlines()) == len(meta) + 3


def test_types_are_little_endian():
    assert {name: np.dtype(spelled).newbyteorder("=") for name, spelled in DTYPES.items()} == {
        "uint16": np.uint16, "uint32": np.uint32
    }  # fmt: skip
    assert all(spelled.startswith("<") for spelled in DTYPES.values())


def test_a_missing_folder_names_the_command_that_makes_it(tmp_path):
    missing = tmp_path / "missing"
    assert refused(read_meta, missing, "mine") == f"{missing}: no such data set; run python data/prepare.py mine"
    for folder in (missing, tmp_path):  # an empty one is no better
        assert refused(vocab_size_of, folder, "mine") == (
            f"{folder}: no prepared data there, so vocab_size is unknown; run python data/prepare.py mine, "
            "or set --vocab_size"
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: "", lambda meta: "{", lambda meta: "[]", lambda meta: "3", lambda meta: b"\xff",
        lambda meta: meta | {"dtype": "float64"}, lambda meta: meta | {"dtype": None},
        lambda meta: meta | {"dtype": ["uint16"]}, lambda meta: meta | {"splits": []},
        lambda meta: meta | {"splits": {"train": meta["splits"]["train"]}},
        lambda meta: meta | {"splits": {"train": 3, "val": 4}},
        lambda meta: meta | {"splits": meta["splits"] | {"val": {"tokens": 40, "bytes": 80}}},
        lambda meta: meta | {"splits": meta["splits"] | {"val": {"tokens": "x", "bytes": 1, "largest_id": 1}}},
        lambda meta: {key: value for key, value in meta.items() if key != "dtype"},
        lambda meta: {key: value for key, value in meta.items() if key != "splits"},
        lambda meta: {key: value for key, value in meta.items() if key != "tokenizer"},
        lambda meta: {key: value for key, value in meta.items() if key != "vocab_size"},
        lambda meta: meta | {"vocab_size": None}, lambda meta: meta | {"vocab_size": "many"},
        lambda meta: {}, lambda meta: {"vocab_size": None}, lambda meta: {"vocab_size": "many"},
    ],
)  # fmt: skip
def test_a_damaged_meta_json_is_refused(corpus, tmp_path, change):
    config = corpus()
    file = tmp_path / "meta.json"
    damaged = change(json.loads(file.read_text(encoding="utf-8")))
    damaged = json.dumps(damaged) if isinstance(damaged, dict) else damaged
    file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    message = f"{file}: not a readable meta.json; run python data/prepare.py {tmp_path}"
    assert refused(read_meta, tmp_path, str(tmp_path)) == message
    assert refused(vocab_size_of, tmp_path, str(tmp_path)) == message
    assert refused(Dataset, config) == message


# --- folders of nanoGPT's


def test_nanogpts_character_folder_is_not_taken_for_gpt2_tokens(corpus, tmp_path):
    config = corpus(meta=False)
    (tmp_path / "meta.pkl").write_bytes(b"")
    for message in (
        refused(Dataset, config), refused(read_meta, tmp_path, "mine"), refused(vocab_size_of, tmp_path, "mine")
    ):  # fmt: skip
        assert "meta.pkl, which may run code and is not read" in message
        assert "python data/prepare.py " in message and message.endswith(" --input=PATH")


def test_nanogpts_folder_is_read_with_a_note(corpus, tmp_path):
    config = corpus(train=[50256, *range(39)], meta=False, vocab_size=50257)
    dataset = Dataset(config)
    assert dataset.note == f"{tmp_path} has no meta.json: read as nanoGPT's uint16 with GPT-2's vocabulary"
    assert dataset.tokenizer == {"kind": "tiktoken", "name": "gpt2"}
    assert dataset.windows("train", np.array([0])).tolist() == [[50256, 0, 1, 2, 3]]
    assert vocab_size_of(tmp_path, "mine") == 50304  # as nanoGPT rounds GPT-2's up
    assert Dataset(corpus()).note is None
