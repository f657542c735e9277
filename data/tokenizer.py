"""Text to token ids and back. A tokenizer is defined in plain JSON, which is stored with the data and in checkpoints.

Nothing is downloaded, except a vocabulary that is asked for by its name and is not in tiktoken's cache.
"""

import base64
import difflib
import queue
import re
import threading
from concurrent.futures import Future

import numpy as np
import tiktoken
import tiktoken.load

from cli.errors import ConfigError, require
from cli.packages import too_old

END_OF_TEXT = "<|endoftext|>"
SMALLEST, LARGEST = 257, 1_000_000  # sizes of a learnt vocabulary; the smallest has the bytes and the end of text
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# GPT-2 and the package tokenizers write bytes as characters: these bytes as themselves, the others as U+0100 and up.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]


class Tokenizer:
    """A vocabulary, and how text is split into its tokens.

    A definition is one of
        {"kind": "byte"}
        {"kind": "char", "chars": "the characters, in the order of their ids"}
        {"kind": "tiktoken", "name": ..., "pat_str": ..., "mergeable_ranks": [...], "special_tokens": {text: id}}
    where mergeable_ranks lists the bytes of the tokens as base64 in the order of their ids, with None for an id that is
    no such token. A vocabulary that was learnt here also has the last form. If a tiktoken definition has only a name,
    `definition` is completed from tiktoken's vocabulary of that name.
    """

    def __init__(self, definition):
        self._encoding = build(definition)
        self.definition = definition if set(definition) != {"kind", "name"} else define(self._encoding)
        self.name = self._encoding.name
        self.vocab_size = self._encoding.n_vocab
        self.eot = self._encoding._special_tokens.get(END_OF_TEXT)  # None if the vocabulary has no end-of-text token

    @classmethod
    def named(cls, name):
        """Return the byte tokenizer or an encoding of tiktoken."""
        return cls({"kind": "byte"} if name == "byte" else {"kind": "tiktoken", "name": name})

    @classmethod
    def of_characters(cls, characters):
        """Return the tokenizer with one id per character, in the order of the code points."""
        return cls({"kind": "char", "chars": "".join(sorted(set(characters)))})

    @classmethod
    def trained(cls, size, texts, sample):
        """Return a byte-level BPE tokenizer of `size` ids, learnt from texts and checked on the texts of `sample`."""
        return cls(learn(size, texts, sample))

    def encode(self, text):
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """Return the ids as an array of uint32. Special tokens that are spelled out in the text are ordinary text."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"character {error.start} of the text is half a surrogate pair: it is not Unicode"
            ) from None

    def decode(self, ids):
        """Return the text. Bytes that are not valid UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids):
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ConfigError(
                    f"id {i} is outside the vocabulary of {self.name}: it has {self.vocab_size} ids from 0"
                )
        try:
            return self._encoding.decode_bytes(ids)
        except KeyError as error:  # tiktoken's vocabularies have unused ids before their special tokens
            raise ConfigError(f"an id names no token of {self.name}, vocab_size {self.vocab_size}: {error}") from None


class CharEncoding:
    """One id per character, with the methods of tiktoken.Encoding that Tokenizer calls."""

    def __init__(self, chars):
        codes = [ord(char) for char in chars]
        self.name, self.chars, self.n_vocab, self._special_tokens = "char", chars, len(chars), {}
        self._ids = np.full(max(codes) + 2, -1, np.int64)  # by code point; the last entry is for all larger ones
        self._ids[codes] = np.arange(len(chars))

    def encode_to_numpy(self, text, disallowed_special=()):
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
        if ids.size and ids.min() < 0:
            missing = sorted(set(text) - set(self.chars))
            first = " ".join(map(repr, missing[:5])) + (" ..." if len(missing) > 5 else "")
            raise ConfigError(
                f"the char vocabulary of {self.n_vocab} characters lacks {first}: leave them out, or prepare the data "
                "again with text that has them or with --tokenizer=byte"
            )
        return ids.astype(np.uint32)

    def decode_bytes(self, ids):
        return "".join(self.chars[i] for i in ids).encode("utf-8")


def build(definition):
    """Return the encoding that a definition describes."""
    match definition:
        case {"kind": "byte"}:
            # Without merges, any pattern gives one id per byte. Pieces of 64 characters are the fastest.
            ranks = {bytes([byte]): byte for byte in range(256)}
            return tiktoken.Encoding(
                "byte", pat_str="(?s).{1,64}", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
            )
        case {"kind": "char", "chars": str(chars)} if chars:
            return CharEncoding(chars)
        case {"kind": "tiktoken", "name": str(name), **rest} if not rest:
            return load(name)
        case {"kind": "tiktoken", "name": str(name), "pat_str": pattern, "mergeable_ranks": tokens, **rest}:
            try:
                ranks = {base64.b64decode(token): i for i, token in enumerate(tokens) if token is not None}
                return tiktoken.Encoding(
                    name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=rest["special_tokens"]
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"the definition of tokenizer {name!r} is damaged ({error}); prepare the data again"
                ) from None
    raise ConfigError(f"this is not a tokenizer's definition: {str(definition)[:60]!r}; prepare the data again")


def define(encoding):
    """Return the definition of a tiktoken.Encoding."""
    tokens = [None] * (max(encoding._mergeable_ranks.values()) + 1)
    for token, i in encoding._mergeable_ranks.items():
        tokens[i] = base64.b64encode(token).decode("ascii")
    return {
        "kind": "tiktoken",
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "mergeable_ranks": tokens,
        "special_tokens": dict(encoding._special_tokens),
    }


def bpe_size(name):
    """Return the vocabulary size in a tokenizer's name such as bpe:4096, end of text included; None for other names."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not (re.fullmatch("[0-9]{1,7}", size) and SMALLEST <= int(size) <= LARGEST):
        raise ConfigError(
            f"--tokenizer={name}: bpe: is followed by the size of the vocabulary, as in bpe:4096, from {SMALLEST} (the "
            f"bytes and the end of text) to {LARGEST:,}"
        )
    return int(size)


def learn(size, texts, sample):
    """Return the definition of a vocabulary of `size` ids: the bytes, the merges of a byte-level BPE, end of text.

    The package tokenizers learns the merges, and tiktoken encodes with them. Both split text by GPT-2's pattern, and
    they have to give the same ids for each text of `sample`.
    """
    bpe = learn_merges(size, texts)
    as_bytes = bytes_of_tokens(bpe)
    tokens = [bytes([byte]) for byte in range(256)] + [token for token in as_bytes.values() if len(token) > 1]
    encoding = tiktoken.Encoding(
        f"bpe:{size}",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={token: i for i, token in enumerate(tokens)},
        special_tokens={END_OF_TEXT: size - 1},
    )
    for text in sample:
        ids = encoding.encode_ordinary(text)
        if [as_bytes[token] for token in bpe.encode(text).tokens] != [tokens[i] for i in ids]:
            raise ConfigError(
                f"--tokenizer=bpe:{size}: tokenizers and tiktoken disagree on text that starts with {text[:40]!r}; use "
                "another tokenizer, and please report it"
            )
    return define(encoding)


def learn_merges(size, texts):
    """Return a tokenizer of the package, for `size` ids with end of text. It merges pairs that occur at least twice."""
    import tokenizers  # rarely needed

    problem = too_old("tokenizers")
    require(not problem, problem)
    by_pattern = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Learning takes time in proportion to the square of a piece's length: hours for a long run of one character.
    bounded = tokenizers.pre_tokenizers.FixedLength(length=1024)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([by_pattern, bounded])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1, min_frequency=2, initial_alphabet=by_pattern.alphabet(), show_progress=False
    )
    train(bpe, texts, trainer)
    bpe.pre_tokenizer = by_pattern
    found = bpe.get_vocab_size() + 1
    if found < size:
        raise ConfigError(
            f"--tokenizer=bpe:{size}: the training split repeats so few pairs that the vocabulary ends at {found}; add "
            f"text, or use bpe:{found}"
        )
    return bpe


def bytes_of_tokens(bpe):
    """Return {token of the package's tokenizer: its bytes}, in the order of the ids."""
    byte_of = dict(zip(map(chr, PRINTABLE), PRINTABLE, strict=True))
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
    in_order = sorted(bpe.get_vocab(), key=bpe.token_to_id)
    return {token: bytes(byte_of[char] for char in token) for token in in_order}


def train(bpe, texts, trainer):
    """Let the package tokenizers learn. It runs in a thread, because Ctrl-C would have to wait in the main thread."""
    outcome, stopped = Future(), threading.Event()

    def until_stopped():
        for text in texts:
            if stopped.is_set():
                raise KeyboardInterrupt
            yield text

    def run():
        try:
            outcome.set_result(bpe.train_from_iterator(until_stopped(), trainer))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        outcome.result()
    finally:
        stopped.set()
        thread.join(timeout=1)  # after the last text it runs no Python code, and cannot be stopped before the process


def load(name):
    """Return the tiktoken.Encoding of this name, from tiktoken's cache folder or from the network."""
    known = ["byte", "char", *sorted(tiktoken.list_encoding_names()), "bpe:4096"]
    if name not in known[2:-1]:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise ConfigError(f"unknown tokenizer {name!r}; {hint}")
    advice = (
        f"to use {name} without a network, run tiktoken.get_encoding({name!r}) on a machine with one, and set "
        "TIKTOKEN_CACHE_DIR to a copy of its cache folder; or use --tokenizer=byte, which needs no file"
    )
    read_without_limit = tiktoken.load.read_file

    def read_file(path):
        return download(path, advice) if path.startswith("http") else read_without_limit(path)

    try:
        tiktoken.load.read_file = read_file  # tiktoken's function waits for ever on a network that drops packets
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # an unreadable cache, or a file that is not the published one
        raise ConfigError(f"the vocabulary of {name} cannot be read ({error}); {advice}") from None
    finally:
        tiktoken.load.read_file = read_without_limit


def download(url, advice, seconds=5):
    """Return the bytes at url. If the network does not answer within `seconds`, raise an error that ends with advice.

    The request runs in a thread, because the time-outs of requests do not bound the wait for a name server.
    """
    import requests  # slow to import, and rarely needed

    answers = queue.SimpleQueue()

    def request():
        try:
            answer = requests.get(url, timeout=seconds, stream=True)
            answer.raise_for_status()
            answers.put(answer)
        except OSError as error:
            answers.put(error)

    threading.Thread(target=request, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
        if isinstance(answer, OSError):
            raise answer
        return answer.content
    except queue.Empty:
        raise ConfigError(f"{url}: no answer within {seconds} s; {advice}") from None
    except OSError as error:
        raise ConfigError(f"{url}: cannot be downloaded ({type(error).__name__}); {advice}") from None
