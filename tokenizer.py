"""Text to token ids and back, from a definition in plain JSON that travels with data and checkpoints.

Nothing is fetched unless a vocabulary is asked for by its name and is not in tiktoken's cache.
"""

import base64
import difflib
import queue
import threading

import numpy as np
import tiktoken
import tiktoken.load

from config import ConfigError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """A vocabulary and the way text is cut into it.

    A definition is one of
        {"kind": "byte"}
        {"kind": "char", "chars": "the characters, in order of their ids"}
        {"kind": "tiktoken", "name": ..., "pat_str": ..., "mergeable_ranks": [...], "special_tokens": {text: id}}
    where mergeable_ranks lists the tokens' bytes as base64 in order of their ids, None where an id is no such token.
    From a tiktoken definition that has nothing but a name, `definition` is completed by tiktoken's own vocabulary.
    """

    def __init__(self, definition):
        self._encoding = build(definition)
        self.definition = definition if set(definition) != {"kind", "name"} else define(self._encoding)
        self.name = self._encoding.name
        self.vocab_size = self._encoding.n_vocab
        self.eot = self._encoding._special_tokens.get(END_OF_TEXT)  # None: the vocabulary has no end of text

    @classmethod
    def named(cls, name):
        """Return the byte tokenizer or an encoding of tiktoken."""
        return cls({"kind": "byte"} if name == "byte" else {"kind": "tiktoken", "name": name})

    @classmethod
    def of_characters(cls, characters):
        """Return the tokenizer with one id per character, in the order of their code points."""
        return cls({"kind": "char", "chars": "".join(sorted(set(characters)))})

    def encode(self, text):
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """Return the ids as an array of uint32; special tokens that the text spells out are ordinary text."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"character {error.start} of the text is half a surrogate pair: it is not Unicode"
            ) from None

    def decode(self, ids):
        """Return the text; bytes that are no UTF-8 become U+FFFD."""
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
        except KeyError as error:  # the vocabularies of tiktoken have holes before their special tokens
            raise ConfigError(f"an id names no token of {self.name}, vocab_size {self.vocab_size}: {error}") from None


class CharEncoding:
    """One id per character, with the methods of tiktoken.Encoding that Tokenizer calls."""

    def __init__(self, chars):
        codes = [ord(char) for char in chars]
        self.name, self.chars, self.n_vocab, self._special_tokens = "char", chars, len(chars), {}
        self._ids = np.full(max(codes) + 2, -1, np.int64)  # by code point; the last entry stands for all beyond
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
            # Without merges any pattern gives one id per byte; pieces of 64 characters are the fastest.
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
                raise ConfigError(f"the definition of tokenizer {name!r} is damaged ({error}): prepare again") from None
    raise ConfigError(f"this is no tokenizer's definition: {str(definition)[:60]!r}; prepare the data again")


def define(encoding):
    """Return the definition of an encoding of tiktoken."""
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


def load(name):
    """Return tiktoken's encoding of that name, from its cache folder or else from the network."""
    known = ["byte", "char", *sorted(tiktoken.list_encoding_names())]
    if name not in known[2:]:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise ConfigError(f"unknown tokenizer {name!r}; {hint}")
    way_out = (
        f"to have {name} without a network, set TIKTOKEN_CACHE_DIR to a folder where tiktoken.get_encoding({name!r}) "
        "ran on a machine with one; or use --tokenizer=byte, which needs no file"
    )
    own_read = tiktoken.load.read_file

    def bounded_read(path):
        return download(path, way_out) if path.startswith("http") else own_read(path)

    try:
        tiktoken.load.read_file = bounded_read  # tiktoken's own waits for ever on a network that swallows packets
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # an unreadable cache, a file that is not the published one
        raise ConfigError(f"the vocabulary of {name} cannot be read ({error}); {way_out}") from None
    finally:
        tiktoken.load.read_file = own_read


def download(url, way_out, seconds=5):
    """Return the bytes at url; a network that does not answer within `seconds` is an error that names the way out.

    The request runs in a thread, since no time-out of requests bounds a name server that stays silent.
    """
    import requests  # slow to import, and hardly ever needed

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
        raise ConfigError(f"{url}: no answer within {seconds} s; {way_out}") from None
    except OSError as error:
        raise ConfigError(f"{url}: cannot be downloaded ({type(error).__name__}); {way_out}") from None
