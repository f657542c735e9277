"""Encoding documents chunk by chunk in bounded memory, and writing the token ids to a .bin file."""

import functools
import hashlib
import itertools
import re

import numpy as np

from data.corpus import read
from data.tokenizer import Tokenizer

# Text without the end of a word is cut after this many characters. Together with one more block, they are fewer than
# the million characters of white space at which tiktoken's regular expressions fail.
MAX_UNSPLIT_CHARS = 2**19
BUNDLE = 2**18  # characters that a worker encodes at once
# A letter or digit before a space, line feed, comma or full stop. Every pattern of tiktoken ends a piece there, in any
# context. After punctuation this is not so: some patterns keep it in one piece with the line feeds that follow.
WORD_END = re.compile(r".*[^\W_](?=[ \n.,。、，])", re.DOTALL)


def training_text(parts, bar):
    """Yield the text from which a vocabulary is learnt, chunk by chunk, and show the progress."""
    bar.set_description("learning the vocabulary")
    bar.total += sum(part.stop - part.start for part in parts)
    for text in chunks(parts, with_end=False):
        yield text
        bar.update(len(text))


def sample_texts(documents, count=500, length=10_000):
    """Yield the first `length` characters of about `count` blocks, spread over the documents."""
    for document in documents[:: -(-len(documents) // count)]:
        for text in itertools.islice(read(document.path), -(-count // len(documents))):
            yield text[:length]


def chunks(parts, with_end):
    """Yield the text of the parts, chunk by chunk. If with_end is set, None follows each part as its end of text."""
    for part in parts:
        yield from whole_words(characters(read(part.document.path), part.start, part.stop))
        if with_end:
            yield None


def group_chunks(chunks):
    """Yield lists of chunks with BUNDLE characters or more, because sending each small file alone would be slow."""
    bundle, length = [], 0
    for chunk in chunks:
        bundle.append(chunk)
        length += len(chunk or "")
        if length >= BUNDLE:
            yield bundle
            bundle, length = [], 0
    if bundle:
        yield bundle


def characters(blocks, start, stop):
    """Yield the characters from start to stop of a text that comes in blocks."""
    position = 0
    for block in blocks:
        if position >= stop:
            return
        yield block[max(0, start - position) : stop - position]
        position += len(block)


def whole_words(blocks):
    """Yield the text of the blocks in chunks that end with a word, so that their ids are those of the whole text.

    If no word ends within MAX_UNSPLIT_CHARS characters, the text is cut there, to bound the memory.
    """
    text = ""
    for block in blocks:
        text += block
        if end := WORD_END.match(text):
            yield text[: end.end()]
            text = text[end.end() :]
        elif len(text) >= MAX_UNSPLIT_CHARS:
            yield text
            text = ""
    if text:
        yield text


def encoder(definition):
    """Return the function that encodes a list of chunks. Each worker process calls this once."""
    return functools.partial(encode, Tokenizer(definition))


def encode(tokenizer, bundle):
    """Return the ids of a list of chunks, in the dtype in which they are stored, and the bytes of their text."""
    end = np.array([tokenizer.eot or 0], np.uint32)
    ids = np.concatenate([end if text is None else tokenizer.encode_array(text) for text in bundle])
    dtype = dtype_of(tokenizer)
    assert ids.max() < tokenizer.vocab_size <= np.iinfo(dtype).max + 1, (
        ids.max(),
        tokenizer.name,
    )  # no id wraps around
    return ids.astype(dtype), sum(len(text.encode("utf-8")) for text in bundle if text is not None)


def dtype_of(tokenizer):
    return np.dtype("<u2" if tokenizer.vocab_size <= 65536 else "<u4")


def write_tokens(path, encoded, bar):
    """Write the ids of (ids, bytes of text) pairs as one raw array. Return the entry of the split in meta.json."""
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
