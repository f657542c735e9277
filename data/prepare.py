"""Turn a corpus into tokens for train.py: write train.bin, val.bin and meta.json into data/NAME.

usage: python data/prepare.py NAME [--input=PATH ...] [--tokenizer=...] [--val_fraction=0.1] [--workers=N]

NAME            the corpus to prepare:
                  stdlib            the Python files of this interpreter's standard library
                  shakespeare_char  tinyshakespeare, by characters (1.1 MB; downloaded unless --input is given)
                  shakespeare       tinyshakespeare, in GPT-2's tokens
                  any other name    the text that --input names
                a NAME with a slash is the folder to write; its last part is the corpus
--input         UTF-8 files, or folders that are searched for .txt, .md and .py files; `--input A B` takes several
--tokenizer     byte | char | bpe:SIZE | gpt2 or another encoding of tiktoken
                bpe:4096 is a byte-level vocabulary of 4,096 tokens, learnt from the training split
                default: bpe:4096 for stdlib, char for shakespeare_char, gpt2 for shakespeare, byte for any other name
--val_fraction  fraction of the documents that goes to validation; the hash of its path decides for each document
                a corpus of one document is cut: the last part of its characters is validation
--workers       number of processes that tokenize; it does not change the result
                default: 1; for more than 32 MB of text one per core, at most 8

If there are several documents, each one ends with the tokenizer's end-of-text token, if it has one.
"""

import contextlib
import inspect
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # a script sees only its own folder: data/

from cli.errors import ConfigError, command, require
from cli.values import convert, literal_or_text, nearest
from config import Config
from data.corpus import CORPORA, find_corpus, scan, split_train_val, stat_of
from data.encode import chunks, dtype_of, encoder, group_chunks, sample_texts, training_text, write_tokens
from data.format import SPLITS, write_meta
from data.tokenizer import Tokenizer, bpe_size
from data.workers import pool
from hardware.machine import usable_cores

LARGE = 32e6  # bytes of text above which there are several workers by default; their start takes half a second
MOST_WORKERS = 8  # by default; with GPT-2's vocabulary, 8 take less than 1 GiB, and one process can feed them


@dataclass
class Options:
    name: str = ""
    input: list[Path] = field(default_factory=list)
    tokenizer: str | None = None
    val_fraction: float = 0.1
    workers: int | None = None


@command
def main(argv):
    options = parse(argv)
    target = Path(os.path.abspath(Config(dataset=options.name).data_dir))
    try:
        with replacing(target) as folder:
            prepare(options, target, folder)
    except KeyboardInterrupt:
        print(f"interrupted: {target} is unchanged", file=sys.stderr)
        return 130


def prepare(options, target, folder):
    """Write the tokens of the corpus and their description into folder, and print a summary."""
    from tqdm import tqdm  # not above, where it would come before the check of Python's version

    started = time.perf_counter()
    documents = find_corpus(options, target, folder)
    choice = options.tokenizer or CORPORA.get(target.name, "byte")
    is_learnt = bpe_size(choice) is not None
    size = sum(stat_of(document.path).st_size for document in documents)
    workers = options.workers or (min(usable_cores(), MOST_WORKERS) if size > LARGE else 1)
    bar = tqdm(total=2 * size, unit="B", unit_scale=True, desc="reading", disable=None)
    with bar, pool(workers) as spread:  # the processes start while this one reads
        tokenizer = None if choice == "char" or is_learnt else Tokenizer.named(choice)
        sha256, lengths, characters = scan(documents, choice == "char", bar)
        parts = split_train_val(documents, lengths, options.val_fraction)
        if is_learnt:
            tokenizer = Tokenizer.trained(bpe_size(choice), training_text(parts["train"], bar), sample_texts(documents))
        tokenizer = tokenizer or Tokenizer.of_characters(characters)
        bar.set_description("encoding")
        with_end = len(documents) > 1 and tokenizer.eot is not None
        encode_all, splits = spread(encoder, tokenizer.definition), {}
        for split in SPLITS:
            bundles = group_chunks(chunks(parts[split], with_end))
            counts = write_tokens(folder / f"{split}.bin", encode_all(bundles), bar)
            require(counts["tokens"], f"{target.name}: the {split} split is empty; add text, or change --val_fraction")
            splits[split] = {"documents": len(parts[split]), **counts}
    corpus = {"name": target.name, "documents": len(documents), "sha256": sha256}
    write_meta(folder / "meta.json", describe(corpus, options, splits, tokenizer))
    print_summary(splits, tokenizer, time.perf_counter() - started, target)


def describe(corpus, options, splits, tokenizer):
    """Return the content of meta.json."""
    if corpus["name"] == "stdlib":
        corpus["python"] = platform.python_version()
    return {
        "corpus": corpus,
        "val_fraction": options.val_fraction,
        "dtype": dtype_of(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "splits": splits,
        "tokenizer": tokenizer.definition,
    }


def print_summary(splits, tokenizer, seconds, target):
    for split, counts in splits.items():
        print(f"{split:5} {counts['documents']:9,} documents {counts['bytes']:15,} bytes {counts['tokens']:15,} tokens")
    vocabulary = f"{tokenizer.name} tokens, vocab_size {tokenizer.vocab_size}, {dtype_of(tokenizer).name}"
    print(f"{vocabulary}, in {seconds:.1f} s: {target}")


# --- the command line


def parse(argv):
    """Return the Options of a command line. For --help, print the help text and exit."""
    known = {"input": str, "tokenizer": str, "val_fraction": float, "workers": int}
    options, words, after_input = Options(), list(argv), False  # after_input: more paths may follow --input
    while words:
        word = words.pop(0)
        if word in ("--help", "-h"):
            print(inspect.cleandoc(__doc__))
            raise SystemExit(0)
        if not word.startswith("--"):
            if after_input:
                options.input.append(Path(word).expanduser())
                continue
            require(not options.name, f"unexpected argument {word!r}; a path to read is given by --input={word}")
            options.name = word
            continue
        name, equals, text = word[2:].partition("=")
        if name not in known:
            raise ConfigError(f"unknown option --{name}{nearest(name, known)}")
        after_input = name == "input" and not equals
        if not equals:
            text = words.pop(0) if words and not words[0].startswith("--") else ""
        require(text, f"--{name} needs a value: --{name}=VALUE")
        value = convert(name, literal_or_text(text, known[name]), known[name], f"--{name}={text}")
        if name == "input":
            options.input.append(Path(value).expanduser())
        else:
            setattr(options, name, value)
    corpora = ", ".join(CORPORA)
    require(options.name.strip("./"), f"name a corpus first: {corpora}, or any other name with --input=PATH")
    require(0 < options.val_fraction < 1, f"val_fraction={options.val_fraction} must be above 0 and below 1")
    require(options.workers is None or options.workers >= 1, f"workers={options.workers} must be at least 1")
    return options


@contextlib.contextmanager
def replacing(target):
    """Yield an empty folder. If the block succeeds, its files are moved to the target; otherwise they are deleted."""
    parent = next(path for path in (target, *target.parents) if path.exists())  # on the same disk as the target
    folder = parent / f".{target.name}.{os.getpid()}.partial"
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
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror}); check permissions and free space, or name another folder"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
