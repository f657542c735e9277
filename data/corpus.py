"""A corpus: where its documents come from, how they are read, and which of them are in the validation split."""

import codecs
import collections
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from cli.errors import ConfigError, require
from cli.values import nearest
from data.tokenizer import download

SUFFIXES = (".txt", ".md", ".py")
CORPORA = {"stdlib": "bpe:4096", "shakespeare_char": "char", "shakespeare": "gpt2"}  # name -> default tokenizer
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"}
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BLOCK = 2**18  # bytes that are read at once


@dataclass(frozen=True)
class Document:
    path: Path
    name: str  # the path relative to the searched folder, with slashes, so that it is the same on every machine


@dataclass(frozen=True)
class Part:
    """The characters start to stop of a document."""

    document: Document
    start: int
    stop: int


def find_corpus(options, target, folder):
    """Return the documents of the corpus, in order. A download is written into folder."""
    name = target.name
    if options.input:
        require(name != "stdlib", "stdlib is this interpreter's library; leave out --input, or choose another name")
        documents = [document for path in options.input for document in find_documents(path)]
    elif name == "stdlib":
        documents = walk(Path(sysconfig.get_path("stdlib")), (".py",), is_library)
    elif name in CORPORA:
        documents = [Document(fetch_shakespeare(target, folder), "input.txt")]
    else:
        raise ConfigError(f"unknown corpus {name!r} without --input=PATH{nearest(name, CORPORA)}")
    # A file that is found twice could be in both splits, and an empty file would only add an end-of-text token.
    found = [(document, stat_of(document.path)) for document in documents]
    # Only files with the same number are resolved to their real paths, because resolving 32,000 paths takes a second.
    numbers = collections.Counter((s.st_dev, s.st_ino) for _, s in found)
    documents = {
        (s.st_dev, s.st_ino) if numbers[s.st_dev, s.st_ino] == 1 else os.path.realpath(document.path): document
        for document, s in found
        if s.st_size
    }
    documents = list(documents.values())
    where = " ".join(map(str, options.input)) or name
    require(documents, f"{where}: no text there; --input takes files, and folders with {', '.join(SUFFIXES)} files")
    return documents


def find_documents(path):
    """Return the documents of one path given by --input."""
    if os.path.isdir(path):
        return walk(path, SUFFIXES)
    require(os.path.isfile(path), f"--input={path}: no file or folder there")
    return [Document(path, path.name)]


def walk(root, suffixes, wanted=lambda name: True):
    """Return the documents below a folder, sorted by name."""

    def refuse(error):
        raise ConfigError(f"{error.filename}: cannot be read ({error.strerror})")

    names = []
    for folder, _, files in os.walk(root, onerror=refuse):
        names += [Path(folder, file).relative_to(root).as_posix() for file in files if file.endswith(suffixes)]
    return [Document(root / name, name) for name in sorted(names) if wanted(name)]


def is_library(name):
    """Return whether a path in the standard library is code that people write: no tests and no generated tables."""
    folders = name.split("/")
    return not NOT_LIBRARY & set(folders) and not folders[-1].startswith("_sysconfigdata_")


def fetch_shakespeare(target, folder):
    """Return the path of tinyshakespeare, checked by its hash: an earlier download, or a new one in folder."""
    path = target / "input.txt"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
        advice = "get that file by other means and name it with --input=PATH"
        content = download(SHAKESPEARE, advice)
        whole = len(content) == SHAKESPEARE_BYTES and hashlib.sha256(content).hexdigest() == SHAKESPEARE_SHA256
        require(whole, f"{SHAKESPEARE}: {len(content)} bytes came, not the {SHAKESPEARE_BYTES} expected; {advice}")
        path = folder / "input.txt"
        path.write_bytes(content)
    return path


def stat_of(path):
    try:
        return os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def read(path):
    """Yield the text of a document in blocks, with unchanged line ends."""
    rest, offset = b"", 0  # bytes of an incomplete character, and their position in the file
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                block = rest + block
                text, used = codecs.utf_8_decode(block, "strict", False)  # the last character may be incomplete
                yield text
                rest, offset = block[used:], offset + used
        codecs.utf_8_decode(rest, "strict", True)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 at byte {offset + error.start}; convert the file, or leave it out"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def scan(documents, with_characters, bar):
    """Read all documents once, so that an unreadable one is found before hours of work.

    Return the sha256 of the concatenated text, the number of characters in each document, and, if with_characters is
    set, the set of all characters.
    """
    digest, lengths, characters = hashlib.sha256(), [], set()
    for document in documents:
        lengths.append(0)
        for text in read(document.path):
            raw = text.encode("utf-8")
            digest.update(raw)
            lengths[-1] += len(text)
            if with_characters:
                characters.update(text)
            bar.update(len(raw))
    return digest.hexdigest(), lengths, characters


def split_train_val(documents, lengths, val_fraction):
    """Return {split: [Part, ...]}.

    The hash of its name decides the split of a document, so adding or removing other documents does not move it. The
    document with the smallest hash is always in validation and the one with the largest hash always in training, so
    that neither split is empty. A single document is cut.
    """
    parts = [Part(document, 0, length) for document, length in zip(documents, lengths, strict=True)]
    if len(parts) == 1:
        cut = int(lengths[0] * (1 - val_fraction))  # as nanoGPT cuts it
        return {"train": [Part(documents[0], 0, cut)], "val": [Part(documents[0], cut, lengths[0])]}
    by_hash = sorted(parts, key=lambda part: hash_to_unit_interval(part.document.name))
    val = [
        part for part in by_hash[:-1] if part is by_hash[0] or hash_to_unit_interval(part.document.name) < val_fraction
    ]
    in_val = set(map(id, val))
    return {
        "train": [part for part in parts if id(part) not in in_val],
        "val": [part for part in parts if id(part) in in_val],
    }


def hash_to_unit_interval(name):
    """Map a name to [0, 1), with a uniform distribution, and to the same number on every machine."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / 2**48
