"""Turn a corpus into the tokens that train.py reads: train.bin, val.bin and meta.json in data/NAME.

usage: python data/prepare.py NAME [--input=PATH ...] [--tokenizer=...] [--val_fraction=0.1] [--workers=N]

NAME            what to prepare; with a slash in it, the folder to write, whose last part is the corpus:
                  stdlib            the Python files of this interpreter's standard library
                  shakespeare_char  tinyshakespeare (1.1 MB, downloaded unless --input has it), by characters
                  shakespeare       the same with GPT-2's tokens
                  any other         the text that --input names
--input         UTF-8 files, or folders that are searched for .txt, .md and .py; `--input A B` takes several
--tokenizer     byte | char | gpt2 or another encoding of tiktoken; default byte, for the two above as said
                bpe:4096: a vocabulary of 4,096 byte-level tokens, learnt from the training split; it is the default
                for stdlib
--val_fraction  share of the documents that goes to validation, chosen by the hash of their paths;
                a corpus of one document is cut at that share of its characters
--workers       processes that tokenize, with the same result for any number of them;
                default 1, above 32 MB of text one for each core, 8 at most

Documents end with the end-of-text token, where there are several and the tokenizer has one.
"""

import codecs
import collections
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder: data/

from config import Config, ConfigError, command, convert, literal_or_text, nearest, require
from data.workers import pool
from hardware import usable_cores
from tokenizer import Tokenizer, bpe_size, download

FORMAT = 1  # of meta.json; raised when a reader of the last one would misread the next
SUFFIXES = (".txt", ".md", ".py")
CORPORA = {"stdlib": "bpe:4096", "shakespeare_char": "char", "shakespeare": "gpt2"}  # and their default tokenizers
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "pydoc_data", "encodings"}
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_BYTES = 1_115_394
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BLOCK = 2**18  # bytes read at once
# Characters to wait for the end of a word. With one block more it stays below the million characters of white
# space at which tiktoken's regular expressions give up.
PATIENCE = 2**19
LOAD = 2**18  # characters that are encoded at once, by one worker
LARGE = 32e6  # bytes of text from which on the default is several workers: their start takes half a second
MOST_WORKERS = 8  # by default: with GPT-2's vocabulary they stay below 1 GiB together, and one process can feed them


@dataclass
class Options:
    name: str = ""
    input: list[Path] = field(default_factory=list)
    tokenizer: str | None = None
    val_fraction: float = 0.1
    workers: int | None = None


@dataclass(frozen=True)
class Document:
    path: Path
    name: str  # the path below the folder that was searched, with slashes: the same on every machine


@dataclass(frozen=True)
class Part:
    """The characters start to stop of a document."""

    document: Document
    start: int
    stop: int


@command
def main(argv):
    options = parse(argv)
    target = Path(os.path.abspath(Config(dataset=options.name).data_dir))
    try:
        with replacing(target) as folder:
            prepare(options, target, folder)
    except KeyboardInterrupt:
        print(f"interrupted: {target} is as it was", file=sys.stderr)
        return 130


def prepare(options, target, folder):
    """Write the corpus' tokens and their description into folder, and print what became of it."""
    started = time.perf_counter()
    documents = find_corpus(options, target, folder)
    choice = options.tokenizer or CORPORA.get(target.name, "byte")
    to_learn = bpe_size(choice)
    size = sum(stat_of(document.path).st_size for document in documents)
    workers = options.workers or (min(usable_cores(), MOST_WORKERS) if size > LARGE else 1)
    bar = tqdm(total=2 * size, unit="B", unit_scale=True, desc="reading", disable=None)
    with bar, pool(workers) as spread:  # the processes start while this one reads
        tokenizer = None if choice == "char" or to_learn else Tokenizer.named(choice)
        sha256, lengths, characters = scan(documents, choice == "char", bar)
        parts = divide(documents, lengths, options.val_fraction)
        if to_learn:
            tokenizer = Tokenizer.trained(to_learn, learn_from(parts["train"], bar), sample(documents))
        tokenizer = tokenizer or Tokenizer.of_characters(characters)
        bar.set_description("encoding")
        encode_all, splits = spread(encoder, tokenizer.definition), {}
        for split in ("train", "val"):
            loads = batch(chunks(parts[split], end=len(documents) > 1 and tokenizer.eot is not None))
            counts = write_tokens(folder / f"{split}.bin", encode_all(loads), bar)
            require(counts["tokens"], f"{target.name}: the {split} split is empty; add text, or change --val_fraction")
            splits[split] = {"documents": len(parts[split]), **counts}
    meta = {
        "format": FORMAT,
        "corpus": {"name": target.name, "documents": len(documents), "sha256": sha256},
        "val_fraction": options.val_fraction,
        "dtype": dtype_of(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "splits": splits,
        "tokenizer": tokenizer.definition,
    }
    if target.name == "stdlib":
        meta["corpus"]["python"] = platform.python_version()
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in meta.items())
    (folder / "meta.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    for split, counts in splits.items():
        print(f"{split:5} {counts['documents']:9,} documents {counts['bytes']:15,} bytes {counts['tokens']:15,} tokens")
    seconds = time.perf_counter() - started
    vocabulary = f"{tokenizer.name} tokens, vocab_size {tokenizer.vocab_size}, {meta['dtype']}"
    print(f"{vocabulary}, in {seconds:.1f} s: {target}")


# --- the command line


def parse(argv):
    """Return the Options of a command line; print the help and exit when it asks for it."""
    known = {"input": str, "tokenizer": str, "val_fraction": float, "workers": int}
    options, words, many = Options(), list(argv), False
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            print(inspect.cleandoc(__doc__))
            raise SystemExit(0)
        if not word.startswith("--"):
            if many:
                options.input.append(Path(word).expanduser())
                continue
            require(not options.name, f"unexpected argument {word!r}; a path to read is --input={word}")
            options.name = word
            continue
        name, equals, text = word[2:].partition("=")
        if name not in known:
            raise ConfigError(f"unknown option --{name}{nearest(name, known)}")
        many = name == "input" and not equals
        if not equals:
            text = words.pop(0) if words and not words[0].startswith("--") else ""
        require(text, f"--{name} needs a value: --{name}=VALUE")
        value = convert(name, literal_or_text(text, known[name]), known[name], f"--{name}={text}")
        if name == "input":
            options.input.append(Path(value).expanduser())
        else:
            setattr(options, name, value)
    corpora = ", ".join(CORPORA)
    require(options.name.strip("./"), f"name a corpus first: {corpora}, or a name of your own with --input=PATH")
    require(0 < options.val_fraction < 1, f"val_fraction={options.val_fraction} must be above 0 and below 1")
    require(options.workers is None or options.workers >= 1, f"workers={options.workers} must be at least 1")
    return options


# --- documents


def find_corpus(options, target, folder):
    """Return the corpus' documents, in order; what has to be downloaded goes into folder."""
    name = target.name
    if options.input:
        require(name != "stdlib", "stdlib is this interpreter's library: leave out --input, or choose another name")
        documents = [document for path in options.input for document in find_documents(path)]
    elif name == "stdlib":
        documents = walk(Path(sysconfig.get_path("stdlib")), (".py",), is_library)
    elif name in CORPORA:
        documents = [Document(fetch_shakespeare(target, folder), "input.txt")]
    else:
        raise ConfigError(f"unknown corpus {name!r} without --input=PATH{nearest(name, CORPORA)}")
    # A file that was reached twice could land in both splits, and an empty one would double the end of text.
    found = [(document, stat_of(document.path)) for document in documents]
    numbers = collections.Counter((s.st_dev, s.st_ino) for _, s in found)  # resolving 32,000 paths takes a second
    documents = {
        (s.st_dev, s.st_ino) if numbers[s.st_dev, s.st_ino] == 1 else os.path.realpath(document.path): document
        for document, s in found
        if s.st_size
    }
    documents = list(documents.values())
    where = " ".join(map(str, options.input)) or name
    require(documents, f"{where}: no text there; --input takes files, and folders with {', '.join(SUFFIXES)} in them")
    return documents


def find_documents(path):
    """Return the documents of one --input."""
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
    """Tell whether a path below the standard library is source that people write: no tests, no generated tables."""
    folders = name.split("/")
    return not NOT_LIBRARY & set(folders) and not folders[-1].startswith("_sysconfigdata_")


def fetch_shakespeare(target, folder):
    """Return the path of the one true tinyshakespeare: an earlier download, or a new one in folder."""
    path = target / "input.txt"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
        way_out = "get that file by other means and name it with --input=PATH"
        content = download(SHAKESPEARE, way_out)
        whole = len(content) == SHAKESPEARE_BYTES and hashlib.sha256(content).hexdigest() == SHAKESPEARE_SHA256
        require(whole, f"{SHAKESPEARE}: {len(content)} bytes came, not the {SHAKESPEARE_BYTES} expected; {way_out}")
        path = folder / "input.txt"
        path.write_bytes(content)
    return path


def stat_of(path):
    try:
        return os.stat(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def read(path):
    """Yield a document's text in blocks, its line ends as they are."""
    rest, offset = b"", 0
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                block = rest + block
                text, used = codecs.utf_8_decode(block, "strict", False)  # False: a character may go on in the next
                yield text
                rest, offset = block[used:], offset + used
        codecs.utf_8_decode(rest, "strict", True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {offset + error.start}; convert it, or leave it out") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


# --- from documents to tokens


def scan(documents, with_characters, bar):
    """Read everything once, so that what cannot be read is found before hours of work.

    Return the sha256 of all text in a row, the characters in each document, and the set of them where wanted.
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


def divide(documents, lengths, val_fraction):
    """Return what each split consists of: {split: [Part, ...]}.

    The hash of its name decides for a document, so that others may come and go without moving it; of several
    documents the least hash is always validation and the greatest always training, so that neither is empty.
    """
    parts = [Part(document, 0, length) for document, length in zip(documents, lengths, strict=True)]
    if len(parts) == 1:
        cut = int(lengths[0] * (1 - val_fraction))  # nanoGPT's cut: the counts known for tinyshakespeare hold
        return {"train": [Part(documents[0], 0, cut)], "val": [Part(documents[0], cut, lengths[0])]}
    by_hash = sorted(parts, key=lambda part: share(part.document.name))
    val = [part for part in by_hash[:-1] if part is by_hash[0] or share(part.document.name) < val_fraction]
    chosen = set(map(id, val))
    return {
        "train": [part for part in parts if id(part) not in chosen],
        "val": [part for part in parts if id(part) in chosen],
    }


def share(name):
    """Map a name to [0, 1), evenly and the same everywhere."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / 2**48


def learn_from(parts, bar):
    """Yield the text of the parts, chunk by chunk, to those who learn a vocabulary from it."""
    bar.set_description("learning the vocabulary")
    bar.total += sum(part.stop - part.start for part in parts)
    for text in chunks(parts, end=False):
        yield text
        bar.update(len(text))


def sample(documents, count=500, length=10_000):
    """Yield the start of some blocks, some hundreds, spread over the documents."""
    for document in documents[:: -(-len(documents) // count)]:
        for text in itertools.islice(read(document.path), -(-count // len(documents))):
            yield text[:length]


def chunks(parts, end):
    """Yield the text of the parts, chunk by chunk; with `end`, a None after each part for the end of text."""
    for part in parts:
        yield from whole_words(between(read(part.document.path), part.start, part.stop))
        if end:
            yield None


def batch(chunks):
    """Yield the chunks in lists of LOAD characters or more: files are often small, and each sending costs."""
    load, length = [], 0
    for chunk in chunks:
        load.append(chunk)
        length += len(chunk or "")
        if length >= LOAD:
            yield load
            load, length = [], 0
    if load:
        yield load


def encoder(definition):
    """Return the function that encodes loads; a worker process makes its own."""
    return functools.partial(encode, Tokenizer(definition))


def encode(tokenizer, load):
    """Return the ids of a load, as they are stored, and the bytes of its text."""
    end = np.array([tokenizer.eot or 0], np.uint32)
    ids = np.concatenate([end if text is None else tokenizer.encode_array(text) for text in load])
    dtype = dtype_of(tokenizer)
    assert ids.max() < tokenizer.vocab_size <= np.iinfo(dtype).max + 1, (ids.max(), tokenizer.name)  # no id wraps
    return ids.astype(dtype), sum(len(text.encode("utf-8")) for text in load if text is not None)


def dtype_of(tokenizer):
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def between(blocks, start, stop):
    """Yield the characters start to stop of a text that comes in blocks."""
    position = 0
    for block in blocks:
        if position >= stop:
            return
        yield block[max(0, start - position) : stop - position]
        position += len(block)


# A letter or digit before a space, line feed, comma or full stop: every pattern of tiktoken ends a piece there,
# whatever stands around it. (Not so after punctuation, which some keep together with the line feeds behind it.)
WORD_END = re.compile(r".*[^\W_](?=[ \n.,。、，])", re.DOTALL)


def whole_words(blocks):
    """Yield the text of blocks in chunks that end with a word: their ids, in a row, are those of the whole text.

    Text without such an end in PATIENCE characters is cut where it is, since nothing else would bound the memory.
    """
    text = ""
    for block in blocks:
        text += block
        if end := WORD_END.match(text):
            yield text[: end.end()]
            text = text[end.end() :]
        elif len(text) >= PATIENCE:
            yield text
            text = ""
    if text:
        yield text


def write_tokens(path, encoded, bar):
    """Write (ids, bytes of text) pairs as one raw array; return what meta.json says of it."""
    digest, tokens, size, largest = hashlib.sha256(), 0, 0, -1
    with open(path, "wb") as file:
        for ids, n_bytes in encoded:
            file.write(ids)
            digest.update(ids)
            tokens += len(ids)
            size += n_bytes
            largest = max(largest, int(ids.max()))
            bar.update(n_bytes)
    return {"tokens": tokens, "bytes": size, "largest_id": largest, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def replacing(target):
    """Give an empty folder whose files become the target's when the block ends well, and vanish otherwise."""
    home = next(path for path in (target, *target.parents) if path.exists())  # on the disk of the target
    folder = home / f".{target.name}.{os.getpid()}.partial"
    try:
        folder.mkdir()
        yield folder
        if target.exists():
            for name in ("input.txt", "train.bin", "val.bin", "meta.json"):
                if (folder / name).exists():
                    os.replace(folder / name, target / name)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); free it, or name another folder") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
