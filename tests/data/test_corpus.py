"""A corpus: which files are its documents, which of them validate, and what cannot be downloaded or read."""

import errno
import hashlib
import http.server
import os
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest

from data import corpus
from data.corpus import Document, hash_to_unit_interval, is_library, split_train_val, walk
from data.prepare import main
from data.tokenizer import Tokenizer
from tests.data.corpora import error_of, load, names, write

# --- documents


def test_stdlib(tmp_path):
    assert main([str(tmp_path / "stdlib")]) == 0
    meta, ids = load(tmp_path / "stdlib")
    assert meta["corpus"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert meta["tokenizer"]["name"] == "bpe:4096" and meta["vocab_size"] == 4096
    root = Path(sysconfig.get_path("stdlib"))
    documents = walk(root, (".py",), is_library)
    kept = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= kept
    unwanted = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data", "encodings"}
    assert not [name for name in kept if unwanted & set(name.split("/")) or "_sysconfigdata_" in name]
    first = next(d for d in documents if hash_to_unit_interval(d.name) >= 0.1 and d.path.stat().st_size)
    tokenizer = Tokenizer(meta["tokenizer"])
    end = ids["train"].tolist().index(tokenizer.eot)
    assert tokenizer.decode(ids["train"][:end].tolist()).encode() == first.path.read_bytes()


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


# --- which documents validate


def documents_named(*many):
    return [Document(Path(name), name) for name in many]


def names_in(parts):
    return [part.document.name for part in parts]


def test_the_split_is_a_function_of_each_name():
    many = [f"folder/doc{i}.txt" for i in range(2000)]
    splits = split_train_val(documents_named(*many), [1] * 2000, 0.1)
    assert 150 < len(splits["val"]) < 250
    assert sorted(names_in(splits["train"]) + names_in(splits["val"])) == sorted(many)
    half = split_train_val(documents_named(*many[::2]), [1] * 1000, 0.1)
    assert names_in(half["val"]) == [name for name in names_in(splits["val"]) if name in many[::2]]
    assert hash_to_unit_interval("argparse.py") == pytest.approx(0.786127, abs=1e-6)  # the same on every machine


@pytest.mark.parametrize("fraction", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_neither_split_is_empty(fraction):
    for n in range(2, 8):
        splits = split_train_val(documents_named(*[f"{i}.txt" for i in range(n)]), [1] * n, fraction)
        assert splits["train"] and splits["val"] and len(splits["train"]) + len(splits["val"]) == n
    same = split_train_val(documents_named("a.txt", "a.txt"), [1, 1], fraction)
    assert len(same["train"]) == len(same["val"]) == 1


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
        monkeypatch.setattr(corpus, "SHAKESPEARE", f"http://127.0.0.1:{server.server_port}/input.txt")
        monkeypatch.setattr(corpus, "SHAKESPEARE_BYTES", len(text))
        monkeypatch.setattr(corpus, "SHAKESPEARE_SHA256", hashlib.sha256(text).hexdigest())
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


# --- what cannot be read


def test_documents_that_are_not_utf8(tmp_path, capsys, monkeypatch):
    good = "é…字🙂 " * 1000
    raw = good.encode("utf-8")
    for bad, at in ((raw + b"\xff" + raw, len(raw)), (raw + b"\xf0\x9f\x99", len(raw)), (b"\xe9t\xe9", 0)):
        write(tmp_path / "in", good=good, sub__bad=bad)
        for block in (3, 4096):
            monkeypatch.setattr(corpus, "BLOCK", block)
            message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
            assert f"{Path('sub') / 'bad.txt'}: not UTF-8 at byte {at};" in message
    assert not (tmp_path / "out").exists()


def test_documents_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", a="one", secret="two")

    def guarded(path, *args, **kwargs):
        if Path(path).name == "secret.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "open", guarded, raising=False)
        message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
    assert "secret.txt: cannot be read (Permission denied)" in message
    os.symlink(tmp_path / "gone", tmp_path / "in" / "link.txt")
    message = error_of(capsys, tmp_path / "out", f"--input={tmp_path / 'in'}")
    assert "link.txt: cannot be read (No such file or directory)" in message
    assert names(tmp_path) == ["in", "in/a.txt", "in/link.txt", "in/secret.txt"]
