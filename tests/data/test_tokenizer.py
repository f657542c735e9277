"""Text to ids and back: nothing is lost, the ids are the published ones, and the definition is all that is needed."""

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tiktoken
import tokenizers
from tiktoken_ext import openai_public

from cli.errors import ConfigError
from config import ROOT
from data import tokenizer
from data.tokenizer import Tokenizer, download

TRICKY = [
    "",
    "Hello, world! The quick brown fox",
    "don't  we'll\t\tit's\n\n\n  def f(x):\r\n    return x\n\n",
    "é…字🙂 नमस्ते 12345 <|endoftext|>\x00\x1c\ufeff\u2028",
    " " * 1000 + "\n" * 1000 + "x" + "\n \n " * 100,
]
CHARACTERS = "ab".join(TRICKY)


@pytest.fixture
def no_vocabulary(monkeypatch, tmp_path):
    """Make tiktoken start from an empty cache folder, and no host be found."""

    def getaddrinfo(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    return tmp_path


def all_kinds():
    learnt = Tokenizer.trained(270, [CHARACTERS], [])
    return [Tokenizer.named("byte"), Tokenizer.named("gpt2"), Tokenizer.of_characters(CHARACTERS), learnt]


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_the_round_trip(gpt2_vocabulary, text):
    for tok in all_kinds():
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert tok.decode_bytes(ids) == text.encode("utf-8")
        assert all(isinstance(i, int) and 0 <= i < tok.vocab_size for i in ids)
        assert tok.encode_array(text).tolist() == ids and tok.encode_array(text).dtype == np.uint32


def test_known_ids(gpt2_vocabulary):
    gpt2 = Tokenizer.named("gpt2")
    assert gpt2.encode("Hello, world! The quick brown fox") == [15496, 11, 995, 0, 383, 2068, 7586, 21831]
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.decode([gpt2.eot]) == "<|endoftext|>"


def test_bytes_are_their_own_ids():
    byte = Tokenizer.named("byte")
    text = "".join(TRICKY)
    assert byte.encode(text) == list(text.encode("utf-8"))
    assert (byte.name, byte.vocab_size, byte.eot) == ("byte", 257, 256)


def test_characters_are_in_order_of_code_points():
    char = Tokenizer.of_characters("hello 🙂")
    assert char.definition == {"kind": "char", "chars": " ehlo🙂"}
    assert char.encode("hole🙂") == [2, 4, 3, 1, 5]
    assert (char.name, char.vocab_size, char.eot) == ("char", 6, None)


def test_special_tokens_in_text_are_text(gpt2_vocabulary):
    for tok in all_kinds():
        ids = tok.encode("a<|endoftext|>b")
        assert tok.eot not in ids and tok.decode(ids) == "a<|endoftext|>b"


def test_the_definition_travels_as_json(gpt2_vocabulary, no_vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_vocabulary))
        originals = all_kinds()
    tiktoken.registry.ENCODINGS.clear()
    for tok in originals:
        copy = Tokenizer(json.loads(json.dumps(tok.definition)))
        assert copy.definition == tok.definition
        assert (copy.name, copy.vocab_size, copy.eot) == (tok.name, tok.vocab_size, tok.eot)
        for text in TRICKY:
            assert copy.encode(text) == tok.encode(text)


def test_a_name_alone_becomes_the_whole_definition(gpt2_vocabulary):
    definition = Tokenizer({"kind": "tiktoken", "name": "gpt2"}).definition
    assert sorted(definition) == ["kind", "mergeable_ranks", "name", "pat_str", "special_tokens"]
    assert len(definition["mergeable_ranks"]) == 50256


def test_holes_in_the_ids_survive():
    ranks = {b"a": 0, b"b": 1, b"ab": 3}  # as in p50k_base, whose special token sits among its ranks
    encoding = tiktoken.Encoding("holes", pat_str=r"\w+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 2})
    definition = tokenizer.define(encoding)
    assert definition["mergeable_ranks"] == ["YQ==", "Yg==", None, "YWI="]
    tok = Tokenizer(json.loads(json.dumps(definition)))
    assert (tok.encode("abba"), tok.vocab_size, tok.eot) == (encoding.encode("abba"), 4, 2)


# --- vocabularies that are learnt


def test_sizes_are_in_the_name():
    assert tokenizer.bpe_size("bpe:257") == 257 and tokenizer.bpe_size("bpe:70000") == 70000
    assert tokenizer.bpe_size("gpt2") is tokenizer.bpe_size("bpes") is None
    for name in (
        "bpe",
        "bpe:",
        "bpe:abc",
        "bpe:256",
        "bpe:1000001",
        "bpe:-300",
        "bpe:1e3",
        "bpe:²",
        "bpe:" + "9" * 9999,
    ):
        with pytest.raises(
            ConfigError, match=rf"--tokenizer={name[:9]}.*: bpe: is followed by .* from 257 .* to 1,000,000"
        ):
            tokenizer.bpe_size(name)


def by_tokenizers(definition):
    """Return what the package tokenizers makes of a definition: its tokens, with every merge that gives one."""
    ranks = {base64.b64decode(token): i for i, token in enumerate(definition["mergeable_ranks"])}
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    char = {}
    for code in [*range(0x80), *range(0x80, 0x800)]:  # all bytes that UTF-8 has for these
        written = level.pre_tokenize_str("x" + chr(code))
        char |= dict(zip(chr(code).encode(), "".join(text for text, _ in written)[1:], strict=True))
    for byte in set(range(256)) - set(char):
        char[byte] = next(c for c in sorted(level.alphabet()) if c not in char.values())

    def name(token):
        return "".join(char[byte] for byte in token)

    merges = []
    for token, i in ranks.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        possible = [pair for pair in pairs if max(ranks.get(half, i) for half in pair) < i]
        merges += [(name(a), name(b)) for a, b in sorted(possible, key=lambda pair: [ranks[half] for half in pair])]
    result = tokenizers.Tokenizer(tokenizers.models.BPE({name(token): i for token, i in ranks.items()}, merges))
    result.pre_tokenizer = level
    return result


def random_texts(seed, count):
    rng = random.Random(seed)
    words = [
        "a",
        "b",
        " ",
        "\n",
        "é",
        "字",
        "🙂",
        "the ",
        "then ",
        "there",
        "'s",
        "12",
        "//",
        "  ",
        "\t",
        "x.y",
        "\u00a0",
    ]
    return ["".join(rng.choices(words, k=rng.randrange(1, 200))) for _ in range(count)]


@pytest.mark.parametrize("size", [257, 258, 300, 600])
def test_a_learnt_vocabulary_encodes_as_tokenizers_does(size):
    texts = [*random_texts(0, 300), *TRICKY]
    tok = Tokenizer.trained(size, texts[:200], texts)
    assert (tok.name, tok.vocab_size, tok.eot) == (f"bpe:{size}", size, size - 1)
    theirs = by_tokenizers(tok.definition)
    for text in texts:
        assert tok.encode(text) == theirs.encode(text).ids
        assert tok.decode(tok.encode(text)) == text


def test_frequent_words_become_tokens():
    tok = Tokenizer.trained(264, ["the cat then the dog there " * 10], [])
    assert [tok.decode([i]) for i in (256, 257, 258)] == ["he", "the", " the"]
    assert tok.encode(" the") == [258]


def test_the_same_text_gives_the_same_vocabulary():
    code = (
        "import hashlib, json, sys; from config import ROOT; from data.tokenizer import Tokenizer\n"
        "texts = [path.read_text(encoding='utf-8') for path in sorted(ROOT.glob('*.py'))]\n"
        "print(hashlib.sha256(json.dumps(Tokenizer.trained(1000, texts, texts).definition).encode()).hexdigest())"
    )
    found = set()
    for threads in ("1", "2", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1


def test_text_too_short_for_the_vocabulary():
    with pytest.raises(
        ConfigError, match=r"--tokenizer=bpe:300: .* the vocabulary ends at 260; add text, or use bpe:260"
    ):
        Tokenizer.trained(300, ["abcd abcd xyz"], [])
    assert Tokenizer.trained(260, ["abcd abcd xyz"], []).vocab_size == 260


def test_disagreement_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizer, "GPT2_PATTERN", r"\S+|\s+")
    with pytest.raises(ConfigError, match="tokenizers and tiktoken disagree on text that starts with 'a b a b"):
        Tokenizer.trained(258, ["a b " * 100], ["x", "a b " * 100])


def test_the_pattern_is_the_published_one():
    assert openai_public.r50k_pat_str == tokenizer.GPT2_PATTERN


@pytest.mark.parametrize("unit", ["a", " ", "!?", "字"])
def test_long_runs_are_learnt_from_in_good_time(unit):
    text = unit * (500_000 // len(unit))
    started = time.perf_counter()
    tok = Tokenizer.trained(258, [text], [text[:1000]])
    assert time.perf_counter() - started < 5
    assert tok.decode(tok.encode(text[:10_001])) == text[:10_001]


@pytest.mark.parametrize("error", [ConfigError("gone"), KeyboardInterrupt()])
def test_what_the_texts_raise_comes_through(error):
    def texts():
        yield "some text"
        raise error

    with pytest.raises(type(error)):
        Tokenizer.trained(300, texts(), [])


def test_learning_can_be_interrupted():
    def texts():
        while True:
            taken.append(None)
            yield "some text " * 100

    taken = []
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.trained(300, texts(), [])
    count = len(taken)
    time.sleep(0.1)
    assert len(taken) == count > 0


# --- what cannot be


def test_partial_characters_can_be_streamed():
    byte = Tokenizer.named("byte")
    ids = byte.encode("🙂")
    assert b"".join(byte.decode_bytes([i]) for i in ids) == "🙂".encode()
    assert byte.decode(ids[:2]) == "\ufffd"


def test_ids_outside_the_vocabulary(gpt2_vocabulary):
    for tok in all_kinds():
        for i in (tok.vocab_size, -1):
            with pytest.raises(ConfigError, match=rf"id {i} is outside the vocabulary of {tok.name}.*{tok.vocab_size}"):
                tok.decode([0, i])
    holes = {"kind": "tiktoken", "name": "holes", "pat_str": ".", "mergeable_ranks": ["YQ==", None, "Yg=="]}
    with pytest.raises(ConfigError, match=r"names no token of holes, vocab_size 3.* 1"):
        Tokenizer({**holes, "special_tokens": {}}).decode([0, 1])


def test_characters_outside_the_vocabulary():
    char = Tokenizer.of_characters("abc")
    with pytest.raises(ConfigError, match=r"3 characters lacks 'Z' 'é' '🙂': leave them out.*--tokenizer=byte"):
        char.encode("aZ🙂bé")
    with pytest.raises(ConfigError, match=r"lacks 'd' 'e' 'f' 'g' 'h' \.\.\.:"):
        char.encode("abcdefghijk")


def test_text_that_is_not_unicode(gpt2_vocabulary):
    for tok in all_kinds():
        with pytest.raises(ConfigError, match="character 2 of the text is half a surrogate pair"):
            tok.encode("ab\udc80")


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'gtp2'; did you mean gpt2\?"):
        Tokenizer.named("gtp2")
    with pytest.raises(ConfigError, match="unknown tokenizer 'zzz'; there are byte, char, cl100k_base, gpt2"):
        Tokenizer.named("zzz")


@pytest.mark.parametrize(
    "definition",
    [
        {"kind": "wordpiece"},
        {"kind": "char", "chars": ""},
        {"kind": "char"},
        {"kind": "tiktoken"},
        [1, 2],
        {"kind": "tiktoken", "name": "x", "pat_str": "(", "mergeable_ranks": ["YQ=="], "special_tokens": {}},
        {"kind": "tiktoken", "name": "x", "pat_str": ".", "mergeable_ranks": [5], "special_tokens": {}},
        {"kind": "tiktoken", "name": "x", "pat_str": ".", "mergeable_ranks": 5, "special_tokens": {}},
        {"kind": "tiktoken", "name": "x", "pat_str": ".", "mergeable_ranks": ["YQ=="]},
    ],
)
def test_damaged_definitions(definition):
    with pytest.raises(ConfigError, match=r"not a tokenizer's definition|is damaged"):
        Tokenizer(definition)


def test_no_network_and_no_vocabulary_is_said_at_once(no_vocabulary):
    started = time.perf_counter()
    with pytest.raises(ConfigError) as error:
        Tokenizer.named("gpt2")
    assert time.perf_counter() - started < 2
    for words in ("vocab.bpe: cannot be downloaded", "set TIKTOKEN_CACHE_DIR to a copy", "--tokenizer=byte"):
        assert words in str(error.value)
    assert not list(no_vocabulary.iterdir())


def test_a_silent_name_server_is_given_up(monkeypatch, no_vocabulary):
    end = threading.Event()

    def getaddrinfo(*args, **kwargs):
        end.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(tokenizer.download, "__defaults__", (0.3,))
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"no answer within 0.3 s; to use gpt2 without a network"):
        Tokenizer.named("gpt2")
    assert time.perf_counter() - started < 2
    end.set()


def test_a_silent_server_is_given_up(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(ConfigError, match=r"(no answer within 0.3 s|ReadTimeout.*); go elsewhere"):
            download(url, "go elsewhere", seconds=0.3)


def test_a_damaged_vocabulary_is_not_used(no_vocabulary):
    (no_vocabulary / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").write_bytes(b"half a fi")
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        Tokenizer.named("gpt2")


def test_torch_is_not_imported():
    code = (
        "import sys; from data.tokenizer import Tokenizer\n"
        "Tokenizer.named('byte').encode('x'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
