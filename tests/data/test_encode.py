"""Text to ids: wherever it is cut into chunks, the ids are those of the whole; they never wrap; memory stays small."""

import random
import subprocess
import sys

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public as published

from config import ROOT
from data import corpus, encode
from data.encode import whole_words
from data.prepare import main
from data.tokenizer import Tokenizer
from tests.data.corpora import TRICKY, load, write

# --- chunks


def random_texts(count):
    rng = random.Random(0)
    bits = [TRICKY[i : i + n] for i in range(len(TRICKY)) for n in (1, 2, 3)]
    bits += [" ", "\n", ".", "a", "1", "'s", "字", "。", "\r\n"] * 30
    return [TRICKY * 3] + ["".join(rng.choices(bits, k=rng.randrange(1, 300))) for _ in range(count)]


def in_blocks(text, size):
    return (text[i : i + size] for i in range(0, len(text), size))


@pytest.mark.parametrize("name", sorted(published.ENCODING_CONSTRUCTORS))
def test_chunks_end_where_every_pattern_ends_a_piece(gpt2_vocabulary, monkeypatch, name):
    ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *args, **kwargs: ranks)
    pattern = published.ENCODING_CONSTRUCTORS[name]()["pat_str"]
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    many = 0
    for text in random_texts(300):
        for size in (1, 5, 64):
            chunks = list(whole_words(in_blocks(text, size)))
            many += len(chunks) > 3
            assert "".join(chunks) == text
            pieces = [piece for chunk in chunks for piece in regex.findall(pattern, chunk)]
            assert pieces == regex.findall(pattern, text)
            ids = [i for chunk in chunks for i in encoding.encode_ordinary(chunk)]
            assert ids == encoding.encode_ordinary(text)
    assert many > 500


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
@pytest.mark.parametrize("block", [5, 1000])
def test_blocks_do_not_change_what_is_written(gpt2_vocabulary, tmp_path, monkeypatch, kind, block):
    write(tmp_path / "in", a=TRICKY * 20, b=TRICKY[::-1] * 20)
    argv = [f"--input={tmp_path / 'in'}", f"--tokenizer={kind}"]
    main([str(tmp_path / "x" / "out"), *argv])
    monkeypatch.setattr(corpus, "BLOCK", block)
    main([str(tmp_path / "y" / "out"), *argv])
    for file in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "x" / "out" / file).read_bytes() == (tmp_path / "y" / "out" / file).read_bytes()


@pytest.mark.parametrize("unit", ["a", " ", "🙂", "!?"])
def test_text_without_ends_of_words_is_cut_all_the_same(gpt2_vocabulary, unit):
    text = unit * (3_000_000 // len(unit)) + "x"
    chunks = list(whole_words(in_blocks(text, corpus.BLOCK)))
    assert "".join(chunks) == text
    assert max(map(len, chunks)) < encode.MAX_UNSPLIT_CHARS + corpus.BLOCK
    gpt2 = Tokenizer.named("gpt2")
    assert gpt2.decode([i for chunk in chunks[-2:] for i in gpt2.encode(chunk)]) == "".join(chunks[-2:])


# --- what is stored


@pytest.mark.parametrize(("n", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_never_wrap(tmp_path, n, dtype):
    characters = "".join(chr(code) for code in range(n + 0x800) if not 0xD800 <= code < 0xE000)
    write(tmp_path, text=characters)
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=char"])
    meta, ids = load(tmp_path / "out")
    assert (meta["vocab_size"], meta["dtype"], meta["splits"]["val"]["largest_id"]) == (n, dtype, n - 1)
    assert np.concatenate([ids["train"], ids["val"]]).tolist() == list(range(n))
    assert (tmp_path / "out" / "val.bin").stat().st_size == len(ids["val"]) * np.dtype(dtype).itemsize


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_memory_stays_small(gpt2_vocabulary, tmp_path, kind):
    with open(tmp_path / "big.txt", "w", encoding="utf-8") as file:
        for _ in range(100_000_000 // (len(TRICKY) * 100)):
            file.write(TRICKY * 100)
    code = "import re, sys; from data.prepare import main; main(sys.argv[1:]); print(open('/proc/self/status').read())"
    argv = [str(tmp_path / "out"), f"--input={tmp_path / 'big.txt'}", f"--tokenizer={kind}"]
    out = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=True)
    peak_kib = int(out.stdout.split("VmHWM:")[1].split()[0])
    assert peak_kib * 1024 < 400e6
