import base64
import errno
import functools
import hashlib
import http.server
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken_ext.openai_public as published

import config
from config import ROOT, ConfigError
from data import prepare, workers
from data.prepare import SHAKESPEARE_SHA256, Document, divide, main, whole_words
from tokenizer import Tokenizer

REAL_SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
TRICKY = (
    "Hello, it's we'll 1234567 don't\n\n\n  def f(x):\r\n\treturn x;\n\n\n\nx.\n\n"
    "字。\n字字字、🙂🙂 é\u0301a \u3000 \x1c\x85_\n_ "
    + " " * 50 + "\n" * 50 + "a/\n//b\u00a0c!?\n" + "ſ's 'S İ١٢٣ ①② \x00<|endoftext|> \ufeff"
)  # fmt: skip


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


# --- what is written


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_documents_become_splits(gpt2_vocabulary, tmp_path, capsys, kind):
    texts = {f"folder{i % 3}__doc{i}": f"{i} {TRICKY[i:]}\r\n" for i in range(30)}
    write(tmp_path / "in", **texts)
    argv = [str(tmp_path / "out"), f"--input={tmp_path / 'in'}", f"--tokenizer={kind}", "--val_fraction=0.3"]
    assert main(argv) == 0
    meta, ids = load(tmp_path / "out")
    tok = Tokenizer(meta["tokenizer"])
    in_order = sorted((name.replace("__", "/") + ".txt", text) for name, text in texts.items())
    decoded = {}
    for split in ids:
        mine = [(name, text) for name, text in in_order if (prepare.share(name) < 0.3) == (split == "val")]
        expected = []
        for _, text in mine:
            expected += tok.encode(text) + ([] if tok.eot is None else [tok.eot])
        assert ids[split].tolist() == expected
        assert meta["splits"][split]["documents"] == len(mine)
        decoded[split] = b"".join(text.encode("utf-8") for _, text in mine)
        assert meta["splits"][split]["bytes"] == len(decoded[split])
    corpus = "".join(text for _, text in in_order).encode("utf-8")
    assert meta["corpus"] == {"name": "out", "documents": 30, "sha256": hashlib.sha256(corpus).hexdigest()}
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["val"]["bytes"] == len(corpus)
    assert (meta["dtype"], meta["val_fraction"], meta["format"]) == ("uint16", 0.3, 1)
    printed = capsys.readouterr().out
    for split in ids:
        assert (
            f"{meta['splits'][split]['documents']} documents" in printed
            and f"{meta['splits'][split]['tokens']:,} tokens" in printed
        )
    assert f"vocab_size {tok.vocab_size}" in printed and str(tmp_path / "out") in printed
    assert names(tmp_path / "out") == ["meta.json", "train.bin", "val.bin"]


def test_one_end_of_text_after_each_document(tmp_path):
    write(tmp_path / "in", a="one", b="two\n", c="", d="three")
    main([str(tmp_path / "out"), f"--input={tmp_path / 'in'}"])
    meta, ids = load(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] + meta["splits"]["val"]["documents"] == 3  # the empty one is none
    for split in ids:
        ends = np.flatnonzero(ids[split] == 256)
        assert len(ends) == meta["splits"][split]["documents"] and ends[-1] == len(ids[split]) - 1
        assert (np.diff(ends) > 1).all() and ends[0] > 0


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_one_document_is_cut_at_its_characters(tmp_path, fraction):
    text = TRICKY * 20
    write(tmp_path, text=text)
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", f"--val_fraction={fraction}"])
    meta, ids = load(tmp_path / "out")
    cut = int(len(text) * (1 - fraction))
    assert bytes(ids["train"].astype("u1")).decode("utf-8") == text[:cut]
    assert bytes(ids["val"].astype("u1")).decode("utf-8") == text[cut:]
    assert meta["corpus"]["documents"] == 1 and meta["corpus"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def counts(meta):
    return meta["splits"]["train"]["tokens"], meta["splits"]["val"]["tokens"], meta["vocab_size"]


def test_nanogpts_counts_for_tinyshakespeare(gpt2_vocabulary, tmp_path):
    """The true text where it lies beside the checkout; elsewhere one of as many characters, which is cut alike."""
    path = REAL_SHAKESPEARE
    if not path.exists():
        write(tmp_path, text="".join(chr(40 + i % 65) for i in range(1_115_394)))
        path = tmp_path / "text.txt"
    main([str(tmp_path / "shakespeare_char"), f"--input={path}"])
    meta, _ = load(tmp_path / "shakespeare_char")
    assert counts(meta) == (1_003_854, 111_540, 65)
    main([str(tmp_path / "shakespeare"), f"--input={path}"])
    meta, ids = load(tmp_path / "shakespeare")
    whole = np.concatenate([ids["train"], ids["val"]])
    text = path.read_text(encoding="utf-8")
    assert Tokenizer.named("gpt2").decode(whole) == text
    if path == REAL_SHAKESPEARE:
        assert meta["corpus"]["sha256"] == SHAKESPEARE_SHA256
        assert counts(meta) == (301_966, 36_059, 50_257)
        golden = "25c01b32b32f41897a6359dd222ec114992dc30c357bcafbfe6c56672f76cd31"
        assert hashlib.sha256(whole.tobytes()).hexdigest() == golden


@pytest.mark.parametrize(("n", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_ids_never_wrap(tmp_path, n, dtype):
    characters = "".join(chr(code) for code in range(n + 0x800) if not 0xD800 <= code < 0xE000)
    write(tmp_path, text=characters)
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=char"])
    meta, ids = load(tmp_path / "out")
    assert (meta["vocab_size"], meta["dtype"], meta["splits"]["val"]["largest_id"]) == (n, dtype, n - 1)
    assert np.concatenate([ids["train"], ids["val"]]).tolist() == list(range(n))
    assert (tmp_path / "out" / "val.bin").stat().st_size == len(ids["val"]) * np.dtype(dtype).itemsize


def test_stdlib(tmp_path):
    assert main([str(tmp_path / "stdlib")]) == 0
    meta, ids = load(tmp_path / "stdlib")
    assert meta["corpus"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert meta["tokenizer"]["name"] == "bpe:4096" and meta["vocab_size"] == 4096
    root = Path(sysconfig.get_path("stdlib"))
    documents = prepare.walk(root, (".py",), prepare.is_library)
    kept = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= kept
    unwanted = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data", "encodings"}
    assert not [name for name in kept if unwanted & set(name.split("/")) or "_sysconfigdata_" in name]
    first = next(d for d in documents if prepare.share(d.name) >= 0.1 and d.path.stat().st_size)
    tokenizer = Tokenizer(meta["tokenizer"])
    end = ids["train"].tolist().index(tokenizer.eot)
    assert tokenizer.decode(ids["train"][:end].tolist()).encode() == first.path.read_bytes()


def test_the_vocabulary_of_characters_is_the_whole_corpus(tmp_path):
    write(tmp_path, text="a" * 95 + "bcdez")  # all but "a" lie in validation
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=char"])
    assert load(tmp_path / "out")[0]["tokenizer"] == {"kind": "char", "chars": "abcdez"}


def test_a_file_reached_twice_counts_once(tmp_path):
    write(tmp_path / "in", a="one", b="two")
    os.symlink(tmp_path / "in" / "a.txt", tmp_path / "in" / "c.txt")
    os.link(tmp_path / "in" / "b.txt", tmp_path / "in" / "d.txt")
    argv = ["--input", str(tmp_path / "in"), str(tmp_path / "in" / "a.txt"), f"--input={tmp_path / 'in'}"]
    main([str(tmp_path / "out"), *argv])
    assert load(tmp_path / "out")[0]["corpus"]["documents"] == 3  # to share a file's content is not to be it


def test_folders_are_searched_for_text_and_files_are_taken_as_they_are(tmp_path):
    for name in ("a.md", "b.py", "c.txt", "d.bin", "sub/e.txt", "f.log"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name, encoding="utf-8")
    main([str(tmp_path / "out"), "--input", str(tmp_path / "in"), str(tmp_path / "in" / "f.log")])
    assert load(tmp_path / "out")[0]["corpus"]["documents"] == 5


def test_a_name_is_a_folder_below_data(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    write(tmp_path, text="some text " * 10)
    assert main(["mine", f"--input={tmp_path / 'text.txt'}"]) == 0
    assert names(tmp_path / "data") == ["mine", "mine/meta.json", "mine/train.bin", "mine/val.bin"]


# --- which documents validate


def documents_named(*many):
    return [Document(Path(name), name) for name in many]


def names_in(parts):
    return [part.document.name for part in parts]


def test_the_split_is_a_function_of_each_name():
    many = [f"folder/doc{i}.txt" for i in range(2000)]
    splits = divide(documents_named(*many), [1] * 2000, 0.1)
    assert 150 < len(splits["val"]) < 250
    assert sorted(names_in(splits["train"]) + names_in(splits["val"])) == sorted(many)
    half = divide(documents_named(*many[::2]), [1] * 1000, 0.1)
    assert names_in(half["val"]) == [name for name in names_in(splits["val"]) if name in many[::2]]
    assert prepare.share("argparse.py") == pytest.approx(0.786127, abs=1e-6)  # the same on every machine


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_neither_split_is_empty(fraction):
    for n in range(2, 8):
        splits = divide(documents_named(*[f"{i}.txt" for i in range(n)]), [1] * n, fraction)
        assert splits["train"] and splits["val"] and len(splits["train"]) + len(splits["val"]) == n
    same = divide(documents_named("a.txt", "a.txt"), [1, 1], fraction)
    assert len(same["train"]) == len(same["val"]) == 1


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
    monkeypatch.setattr(prepare, "BLOCK", block)
    main([str(tmp_path / "y" / "out"), *argv])
    for file in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "x" / "out" / file).read_bytes() == (tmp_path / "y" / "out" / file).read_bytes()


@pytest.mark.parametrize("unit", ["a", " ", "🙂", "!?"])
def test_text_without_ends_of_words_is_cut_all_the_same(gpt2_vocabulary, unit):
    text = unit * (3_000_000 // len(unit)) + "x"
    chunks = list(whole_words(in_blocks(text, prepare.BLOCK)))
    assert "".join(chunks) == text
    assert max(map(len, chunks)) < prepare.PATIENCE + prepare.BLOCK
    gpt2 = Tokenizer.named("gpt2")
    assert gpt2.decode([i for chunk in chunks[-2:] for i in gpt2.encode(chunk)]) == "".join(chunks[-2:])


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


# --- in several processes


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2", "bpe:300"])
def test_any_number_of_workers_writes_the_same(gpt2_vocabulary, tmp_path, monkeypatch, kind):
    write(tmp_path / "in", **{f"doc{i}": f"{i} {TRICKY * (i % 7)}" for i in range(40)})
    monkeypatch.setattr(prepare, "LOAD", 300)
    written = []
    for n in (1, 2, 3):
        out = tmp_path / str(n) / "out"
        assert main([str(out), f"--input={tmp_path / 'in'}", f"--tokenizer={kind}", f"--workers={n}"]) == 0
        written.append({file: (out / file).read_bytes() for file in names(out)})
        assert not multiprocessing.active_children()
    assert written[0] == written[1] == written[2] and len(written[0]) == 3


def test_results_come_in_order_and_items_are_taken_as_they_are_needed():
    powers, taken = [300_000, 1, 2, 200_000, 3, *range(100)], []
    with workers.pool(2) as spread:
        raised = spread(functools.partial, pow, 3)(taken.append(power) or power for power in powers)
        for i, result in enumerate(raised):
            assert result == 3 ** powers[i] and len(taken) <= i + 2 * workers.AHEAD
    assert taken == powers


def test_an_exception_in_a_worker_is_raised_here():
    with workers.pool(2) as spread:
        raised = spread(functools.partial, pow, 3)([1, 2, "x"])
        assert [next(raised), next(raised)] == [3, 9]
        with pytest.raises(TypeError, match="unsupported operand"):
            next(raised)
    with pytest.raises(ConfigError, match="lacks 'Z'"), workers.pool(2) as spread:
        list(spread(prepare.encoder, {"kind": "char", "chars": "abc"})([["a", "b"], ["c", "Z"]]))
    assert not multiprocessing.active_children()


def test_a_mistake_found_by_a_worker_is_one_line(tmp_path, monkeypatch, capsys):
    write(tmp_path / "in", a="one", b="two é")
    scan = prepare.scan

    def too_few_characters(*args):
        sha256, lengths, characters = scan(*args)
        return sha256, lengths, characters - {"é"}

    monkeypatch.setattr(prepare, "scan", too_few_characters)
    argv = (tmp_path / "out", f"--input={tmp_path / 'in'}", "--tokenizer=char", "--workers=2")
    assert "characters lacks 'é'" in error_of(capsys, *argv)
    assert names(tmp_path) == ["in", "in/a.txt", "in/b.txt"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_dies_is_one_line(tmp_path, monkeypatch, capsys, count):
    write(tmp_path / "in", **{f"doc{i}": TRICKY * 20 for i in range(10)})
    monkeypatch.setattr(prepare, "LOAD", 300)
    before, write_tokens = names(tmp_path), prepare.write_tokens

    def after_a_death(*args):
        for process in multiprocessing.active_children()[:count]:
            process.kill()
        return write_tokens(*args)

    monkeypatch.setattr(prepare, "write_tokens", after_a_death)
    message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}", "--workers=2")
    assert "a worker process died" in message and "--workers=1" in message
    assert names(tmp_path) == before and not multiprocessing.active_children()


@pytest.mark.skipif(os.name == "nt", reason="no process groups")
@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_is_one_line(gpt2_vocabulary, tmp_path, n):
    write(tmp_path, text=TRICKY * 100_000)
    argv = [str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=gpt2", f"--workers={n}"]
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "data" / "prepare.py"), *argv], stderr=subprocess.PIPE, start_new_session=True
    )
    while not list(tmp_path.glob(".out.*/train.bin")):
        assert run.poll() is None
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does it: to all processes
    assert run.communicate()[1].decode() == f"interrupted: {tmp_path / 'out'} is as it was\n"
    assert run.returncode == 130 and names(tmp_path) == ["text.txt"]


def test_small_corpora_start_no_process(tmp_path, monkeypatch):
    write(tmp_path, text="some text " * 10)
    started = []

    def pool(n):
        started.append(n)
        return workers.pool(1)

    monkeypatch.setattr(prepare, "pool", pool)
    for large, cores in ((1000, 4), (10, 4), (10, 100)):
        monkeypatch.setattr(prepare, "LARGE", large)
        monkeypatch.setattr(prepare, "usable_cores", lambda cores=cores: cores)
        main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}"])
    assert started == [1, 4, 8]


# --- a vocabulary of the corpus' own


def test_a_vocabulary_is_learnt_from_the_training_split(tmp_path):
    texts = {f"doc{i}": f"the cat sat on the mat {i}\n" * 5 for i in range(30)}
    val = [name for name in texts if prepare.share(f"{name}.txt") < 0.1]
    assert val
    write(tmp_path / "in", **texts | {name: "xyz " * 100 for name in val})
    assert main([str(tmp_path / "out"), f"--input={tmp_path / 'in'}", "--tokenizer=bpe:280"]) == 0
    meta, ids = load(tmp_path / "out")
    tok = Tokenizer(meta["tokenizer"])
    assert (tok.name, tok.vocab_size, tok.eot, meta["dtype"]) == ("bpe:280", 280, 279, "uint16")
    learnt = [base64.b64decode(token) for token in meta["tokenizer"]["mergeable_ranks"]]
    assert learnt[:256] == [bytes([i]) for i in range(256)] and len(learnt) == 279
    assert b" the" in learnt and b"xy" not in learnt and b"yz" not in learnt
    assert tok.decode(ids["val"]) == ("xyz " * 100 + "<|endoftext|>") * len(val)
    assert tok.decode(ids["train"]).count("<|endoftext|>") == meta["splits"]["train"]["documents"] == 30 - len(val)


def test_one_document_is_enough_to_learn_from(tmp_path):
    write(tmp_path, text=TRICKY * 20)
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=bpe:300"])
    meta, ids = load(tmp_path / "out")
    assert Tokenizer(meta["tokenizer"]).decode(np.concatenate([ids["train"], ids["val"]])) == TRICKY * 20


# --- nothing half-written


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch, capsys, failure, existing):
    write(tmp_path / "in", a="one", b="two")
    out = tmp_path / "deep" / "out"
    argv = [str(out), f"--input={tmp_path / 'in'}"]
    if existing:
        main(argv)
        (out / "notes.txt").write_text("mine", encoding="utf-8")
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if (tmp_path / name).is_file()}
    folders = names(tmp_path)
    real = prepare.write_tokens

    def failing(path, *args):
        if path.name == "val.bin":
            path.write_bytes(b"half")
            raise failure
        return real(path, *args)

    monkeypatch.setattr(prepare, "write_tokens", failing)
    capsys.readouterr()
    assert main([*argv, "--tokenizer=char"]) == (130 if isinstance(failure, KeyboardInterrupt) else 2)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert names(tmp_path) == folders
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_preparing_again_replaces_only_its_own_files(tmp_path):
    write(tmp_path / "in", a="one", b="two")
    out = tmp_path / "out"
    main([str(out), f"--input={tmp_path / 'in'}"])
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    main([str(out), f"--input={tmp_path / 'in'}", "--tokenizer=char"])
    assert load(out)[0]["tokenizer"]["kind"] == "char"
    assert names(out) == ["meta.json", "notes.txt", "train.bin", "val.bin"]


# --- the download


class Server(http.server.BaseHTTPRequestHandler):
    content = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *args):
        pass


@pytest.fixture
def served(monkeypatch):
    """Serve a text of our own in tinyshakespeare's place."""
    text = b"First Citizen: Before we proceed any further, hear me speak.\n" * 10
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(prepare, "SHAKESPEARE", f"http://127.0.0.1:{server.server_port}/input.txt")
        monkeypatch.setattr(prepare, "SHAKESPEARE_BYTES", len(text))
        monkeypatch.setattr(prepare, "SHAKESPEARE_SHA256", hashlib.sha256(text).hexdigest())
        monkeypatch.setattr(Server, "content", text)
        yield text
        server.shutdown()


def test_shakespeare_is_downloaded_once(served, tmp_path, monkeypatch):
    out = tmp_path / "shakespeare_char"
    assert main([str(out)]) == 0
    assert (out / "input.txt").read_bytes() == served
    monkeypatch.setattr(Server, "content", b"")
    assert main([str(out), "--tokenizer=byte"]) == 0
    meta, ids = load(out)
    assert bytes(np.concatenate([ids["train"], ids["val"]]).astype("u1")) == served
    assert meta["corpus"]["sha256"] == hashlib.sha256(served).hexdigest()


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: text[:-1] + b"!"])
def test_a_damaged_download_is_refused(served, tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr(Server, "content", damage(served))
    message = error_of(capsys, tmp_path / "shakespeare_char")
    assert "bytes came, not the" in message and "--input=PATH" in message
    assert names(tmp_path) == []


def test_no_network_is_said_at_once(tmp_path, capsys):
    message = error_of(capsys, tmp_path / "shakespeare_char")
    assert "cannot be downloaded" in message and "--input=PATH" in message
    assert names(tmp_path) == []


# --- bad input


def test_documents_that_are_not_utf8(tmp_path, capsys, monkeypatch):
    good = "é…字🙂 " * 1000
    raw = good.encode("utf-8")
    for bad, at in ((raw + b"\xff" + raw, len(raw)), (raw + b"\xf0\x9f\x99", len(raw)), (b"\xe9t\xe9", 0)):
        write(tmp_path / "in", good=good, sub__bad=bad)
        for block in (3, 4096):
            monkeypatch.setattr(prepare, "BLOCK", block)
            message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
            assert f"{Path('sub') / 'bad.txt'}: not UTF-8 at byte {at};" in message
    assert not (tmp_path / "out").exists()


def test_documents_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", a="one", secret="two")

    def guarded(path, *args, **kwargs):
        if Path(path).name == "secret.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *args, **kwargs)

    monkeypatch.setattr(prepare, "open", guarded, raising=False)
    message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
    assert "secret.txt: cannot be read (Permission denied)" in message
    monkeypatch.undo()
    os.symlink(tmp_path / "gone", tmp_path / "in" / "link.txt")
    message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
    assert "link.txt: cannot be read (No such file or directory)" in message
    assert names(tmp_path) == ["in", "in/a.txt", "in/link.txt", "in/secret.txt"]


def test_folders_that_cannot_be_written(tmp_path, capsys):
    write(tmp_path, text="some text " * 10)
    for out in (tmp_path / "text.txt" / "out", tmp_path / "text.txt"):
        message = error_of(capsys, out, f"--input={tmp_path / 'text.txt'}")
        assert f"{out}: cannot be written (Not a directory)" in message
    assert names(tmp_path) == ["text.txt"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a corpus first: stdlib, shakespeare_char, shakespeare, or a name of your own with --input=PATH"),
        ([".."], "name a corpus first"),
        (["OUT/shakspeare"], "unknown corpus 'shakspeare' without --input=PATH; did you mean shakespeare?"),
        (["OUT/novels"], "unknown corpus 'novels' without --input=PATH; --help"),
        (["OUT/x", "--input=IN/nothing"], "IN/nothing: no file or folder there"),
        (["OUT/x", "--input=IN/empty"], "IN/empty: no text there; --input takes files, and folders with .txt"),
        (["OUT/x", "--input=IN/empty/none.txt"], "none.txt: no text there"),
        (["OUT/x", "--input=IN/short.txt"], "x: the train split is empty; add text"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=gtp2"], "unknown tokenizer 'gtp2'; did you mean gpt2?"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bert"], "unknown tokenizer 'bert'; there are byte, char, cl100k"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bpe:abc"], "bpe:abc: after bpe: comes the size of the vocabulary"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bpe:100"], "as in bpe:4096, from 257 (the bytes and the end of te"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bpe:4096"], "the vocabulary ends at 265; add text, or use bpe:265"),
        (["OUT/x", "--input=IN/a.txt", "--workers=0"], "workers=0 must be at least 1"),
        (["OUT/x", "--input=IN/a.txt", "--workers=all"], "workers expects an integer, got 'all'"),
        (["OUT/x", "--input=IN/a.txt", "--val_fraction=0"], "val_fraction=0.0 must be above 0 and below 1"),
        (["OUT/x", "--input=IN/a.txt", "--val_fraction=1.0"], "val_fraction=1.0 must be above 0 and below 1"),
        (["OUT/x", "--input=IN/a.txt", "--val_fraction=some"], "val_fraction expects a number, got 'some'"),
        (["OUT/x", "--input=IN/a.txt", "--tokeniser=byte"], "unknown option --tokeniser; did you mean tokenizer?"),
        (["OUT/x", "--input"], "--input needs a value: --input=VALUE"),
        (["OUT/x", "--input="], "--input needs a value: --input=VALUE"),
        (["OUT/x", "--input", "--tokenizer=byte"], "--input needs a value: --input=VALUE"),
        (["OUT/x", "IN/a.txt"], "unexpected argument 'IN/a.txt'; a path to read is --input=IN/a.txt"),
        (["OUT/stdlib", "--input=IN/a.txt"], "leave out --input, or choose another name"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, capsys, argv, message):
    write(tmp_path / "in", a="some text " * 10, empty__none="", short="x")

    def placed(text):
        return text.replace("OUT", str(tmp_path / "out")).replace("IN", str(tmp_path / "in"))

    before = names(tmp_path)
    assert placed(message) in error_of(capsys, *map(placed, argv))
    assert names(tmp_path) == before


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for word in ("stdlib", "shakespeare_char", "--input", "--tokenizer", "--val_fraction", "--workers", "bpe:4096"):
        assert word in printed


def test_as_a_script(tmp_path):
    write(tmp_path, text="é…字🙂 " * 100)
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"}
    argv = [sys.executable, str(ROOT / "data" / "prepare.py"), str(tmp_path / "out"), "--input", "text.txt"]
    run = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    _, ids = load(tmp_path / "out")
    raw = bytes(np.concatenate([ids["train"], ids["val"]]).astype("u1"))
    assert raw == (tmp_path / "text.txt").read_bytes()
    bad = subprocess.run([*argv[:2], "nothing"], cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stderr.startswith("error: unknown corpus 'nothing'")
