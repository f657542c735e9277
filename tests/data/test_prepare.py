"""The command that prepares data: what it writes and says, what it refuses, and that nothing is ever half-written."""

import base64
import errno
import hashlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import config
from config import ROOT
from data import prepare, workers
from data.corpus import SHAKESPEARE_SHA256, hash_to_unit_interval
from data.prepare import main
from data.tokenizer import Tokenizer
from tests.data.corpora import TRICKY, error_of, load, names, write

REAL_SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"


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
        mine = [(name, text) for name, text in in_order if (hash_to_unit_interval(name) < 0.3) == (split == "val")]
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


def test_the_vocabulary_of_characters_is_the_whole_corpus(tmp_path):
    write(tmp_path, text="a" * 95 + "bcdez")  # all but "a" lie in validation
    main([str(tmp_path / "out"), f"--input={tmp_path / 'text.txt'}", "--tokenizer=char"])
    assert load(tmp_path / "out")[0]["tokenizer"] == {"kind": "char", "chars": "abcdez"}


def test_a_name_is_a_folder_below_data(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    write(tmp_path, text="some text " * 10)
    assert main(["mine", f"--input={tmp_path / 'text.txt'}"]) == 0
    assert names(tmp_path / "data") == ["mine", "mine/meta.json", "mine/train.bin", "mine/val.bin"]


# --- a vocabulary of the corpus' own


def test_a_vocabulary_is_learnt_from_the_training_split(tmp_path):
    texts = {f"doc{i}": f"the cat sat on the mat {i}\n" * 5 for i in range(30)}
    val = [name for name in texts if hash_to_unit_interval(f"{name}.txt") < 0.1]
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


# --- how many processes


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
    assert run.communicate()[1].decode() == f"interrupted: {tmp_path / 'out'} is unchanged\n"
    assert run.returncode == 130 and names(tmp_path) == ["text.txt"]


def test_folders_that_cannot_be_written(tmp_path, capsys):
    write(tmp_path, text="some text " * 10)
    for out in (tmp_path / "text.txt" / "out", tmp_path / "text.txt"):
        message = error_of(capsys, out, f"--input={tmp_path / 'text.txt'}")
        assert f"{out}: cannot be written (Not a directory)" in message
    assert names(tmp_path) == ["text.txt"]


# --- the command line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a corpus first: stdlib, shakespeare_char, shakespeare, or any other name with --input=PATH"),
        ([".."], "name a corpus first"),
        (["OUT/shakspeare"], "unknown corpus 'shakspeare' without --input=PATH; did you mean shakespeare?"),
        (["OUT/novels"], "unknown corpus 'novels' without --input=PATH; --help"),
        (["OUT/x", "--input=IN/nothing"], "IN/nothing: no file or folder there"),
        (["OUT/x", "--input=IN/empty"], "IN/empty: no text there; --input takes files, and folders with .txt"),
        (["OUT/x", "--input=IN/empty/none.txt"], "none.txt: no text there"),
        (["OUT/x", "--input=IN/short.txt"], "x: the train split is empty; add text"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=gtp2"], "unknown tokenizer 'gtp2'; did you mean gpt2?"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bert"], "unknown tokenizer 'bert'; there are byte, char, cl100k"),
        (["OUT/x", "--input=IN/a.txt", "--tokenizer=bpe:abc"], "bpe:abc: bpe: is followed by the size of the vocab"),
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
        (["OUT/x", "IN/a.txt"], "unexpected argument 'IN/a.txt'; a path to read is given by --input=IN/a.txt"),
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
