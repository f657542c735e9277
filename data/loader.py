"""Tokens to batches. (seed, step, micro_step, rank) alone decide which windows are in a batch. So there is no state to
save, prefetching cannot change the order, and the global batch does not depend on the number of ranks.

A batch is read from the file as windows of T + 1 ids. x is all but the last id and y is all but the first, both int64.
They are copied to the device; for CUDA, from pinned memory.
"""

import functools
import hashlib
import itertools
import math
import os
import threading
from queue import Queue

import numpy as np
import torch

from cli.errors import ConfigError, require
from data.format import SPLITS, read_meta

PREAD = hasattr(os, "pread")  # not on Windows
STARTS = 4096  # samples whose starts are computed at a time


class Dataset:
    """A prepared corpus: one memory map per split, checked against the config and against meta.json."""

    def __init__(self, config):
        meta = read_meta(config.data_dir, config.dataset)
        self.folder, self.block_size, self.vocab_size = config.data_dir, config.block_size, config.vocab_size
        self.tokenizer, self.note, self.val_bytes = meta.tokenizer, meta.note, meta.counts["val"].get("bytes")
        self.files, self.tokens = {}, {}
        for split in SPLITS:
            file, expected = self.folder / f"{split}.bin", meta.counts[split].get("tokens")
            prepare = f"run python data/prepare.py {config.dataset}"
            require(file.exists(), f"{file}: missing; {prepare}")
            n_bytes, dtype = file.stat().st_size, np.dtype(meta.dtype)
            found, rest = divmod(n_bytes, dtype.itemsize)
            is_whole = rest == 0 and expected in (None, found)
            wanted = f"{expected or 'a whole number of'} {dtype.name} tokens"
            require(is_whole, f"{file}: {n_bytes} bytes are not {wanted}; {prepare}")
            window, shorter = self.block_size + 1, f" or --block_size={found - 1} at most" if found > 1 else ""
            too_short = f"{file}: {found} tokens, but one window needs block_size + 1 = {window}"
            require(found >= window, f"{too_short}; use more text{shorter}")
            largest = meta.counts[split].get("largest_id", -1)
            too_large = f"{file}: holds id {largest}, but vocab_size={self.vocab_size}"
            require(largest < self.vocab_size, f"{too_large}; use --vocab_size={largest + 1}")
            self.files[split] = file.open("rb")
            self.tokens[split] = np.memmap(self.files[split], dtype=dtype, mode="r")

    def windows(self, split: str, starts: np.ndarray) -> np.ndarray:
        """Return the T + 1 ids at each start, (B, T + 1). If an id is outside the vocabulary, raise ConfigError."""
        tokens, file, length = self.tokens[split], self.files[split].fileno(), self.block_size + 1
        if PREAD:  # what is read through the memory map would count towards the resident set size of this process
            n_bytes, size = length * tokens.itemsize, tokens.itemsize
            ids = b"".join([os.pread(file, n_bytes, start * size) for start in starts.tolist()])
        else:
            ids = b"".join([tokens[start : start + length].tobytes() for start in starts.tolist()])
        ids = np.frombuffer(ids, tokens.dtype).reshape(len(starts), length)
        if ids.max() >= self.vocab_size:
            row, column = np.argwhere(ids >= self.vocab_size)[0]
            raise ConfigError(
                f"{self.folder / split}.bin: id {ids[row, column]} at token {starts[row] + column} is beyond "
                f"vocab_size={self.vocab_size}; the data was made with another tokenizer"
            )
        return ids

    def epoch_windows(self) -> int:
        """Return the number of windows in an epoch of the training split."""
        return max(1, (len(self.tokens["train"]) - 1) // self.block_size - 1)

    def starts(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """Return where the windows of the given samples start in the training split.

        With n windows in an epoch, sample i is window permute(i mod n) of epoch i // n. The windows of an epoch do not
        overlap. Each epoch shifts them by another offset, so that every window of the split can be drawn.
        """
        n = self.epoch_windows()
        slack = len(self.tokens["train"]) - 1 - n * self.block_size
        epochs, result = samples // n, np.empty(len(samples), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            offset = keyed(seed, epoch, "offset") % (slack + 1)
            result[chosen] = offset + permute(samples[chosen] % n, n, keyed(seed, epoch, "order")) * self.block_size
        return result

    def batch(self, config, step: int, micro_step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
        """Return x and y of one micro-step on one rank, (2, B, T) int64."""
        micro_batch = step * config.gradient_accumulation_steps + micro_step * world_size + rank
        first, n = divmod(micro_batch * config.batch_size, STARTS)
        last = first + (n + config.batch_size - 1) // STARTS
        blocks = [self.block_of_starts(config.seed, i) for i in range(first, last + 1)]
        starts = blocks[0] if first == last else np.concatenate(blocks)
        return inputs_and_targets(self.windows("train", starts[n : n + config.batch_size]))

    def batches(self, config, first_step: int, rank: int = 0, world_size: int = 1):
        """Yield x and y of each micro-step on one rank, (2, B, T) int64, from first_step on, without end."""
        for step in itertools.count(first_step):
            for micro_step in range(config.gradient_accumulation_steps // world_size):
                yield self.batch(config, step, micro_step, rank, world_size)

    @functools.lru_cache(maxsize=2)  # noqa: B019 (a data set lives as long as its run)
    def block_of_starts(self, seed: int, block: int) -> np.ndarray:
        """Return the starts of STARTS samples. For a single batch, this would take longer than reading the batch."""
        return self.starts(seed, block * STARTS + np.arange(STARTS))

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a validation loss in bits per byte of the raw text; None if meta.json does not have the bytes."""
        return loss / math.log(2) * len(self.tokens["val"]) / self.val_bytes if self.val_bytes else None

    def validation(self, config):
        """Yield (2, B, T) batches: all non-overlapping windows of the split, or eval_iters batches spread over it."""
        starts = np.arange((len(self.tokens["val"]) - 1) // self.block_size) * self.block_size
        wanted = None if config.eval_iters is None else config.eval_iters * config.batch_size
        if wanted is not None and wanted < len(starts):
            starts = starts[np.arange(wanted) * len(starts) // wanted]  # evenly spaced, the same in every evaluation
        for first in range(0, len(starts), config.batch_size):
            yield inputs_and_targets(self.windows("val", starts[first : first + config.batch_size]))


def inputs_and_targets(windows: np.ndarray) -> torch.Tensor:
    """Return x and y, (2, B, T) int64: all but the last id of each window, and all but the first."""
    n, length = windows.shape
    both = np.empty((2, n, length - 1), dtype=np.int64)
    both[0], both[1] = windows[:, :-1], windows[:, 1:]
    return torch.from_numpy(both)


def keyed(seed: int, epoch: int, purpose: str) -> int:
    """Return a 64-bit hash of the arguments, which is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {purpose}".encode(), digest_size=8).digest(), "little")


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the image of each index under a permutation of range(n) that `key` selects, in constant memory.

    A Feistel network of four rounds permutes the numbers with the smallest even number of bits that holds n. Results
    outside range(n) are permuted again until they are inside (cycle-walking), so the whole remains a permutation.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    index = index.astype(np.uint64)
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = index[outside] >> np.uint64(half), index[outside] & mask
        for i in range(4):
            mixed = (right + np.uint64(key >> 16 * i & 0xFFFF)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32) & mask)
        index[outside] = left << np.uint64(half) | right
        outside = index >= n
    return index.astype(np.int64)


class Loader:
    """Gives the (x, y) of each micro-step from a step on. While one is in use, the next is read and copied."""

    def __init__(self, dataset: Dataset, config, device: torch.device, first_step: int, rank=0, world_size=1):
        self.device, self.cuda = device, device.type == "cuda"
        total = config.gradient_accumulation_steps
        uneven = f"gradient_accumulation_steps={total} does not divide by {world_size}, the number of processes"
        require(total % world_size == 0, uneven)
        self.buffers = self.copied = None
        if self.cuda:  # two pinned buffers with an event each: one is filled while the other is copied
            shape = (2, config.batch_size, config.block_size)
            self.buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.copied = [torch.cuda.Event() for _ in range(2)]
            self.stream = torch.cuda.Stream(device)  # name the device, because a thread starts on device 0
        self.queue, self.stopped = Queue(maxsize=1), False
        batches = dataset.batches(config, first_step, rank, world_size)
        self.thread = threading.Thread(target=self.produce, args=(batches,), daemon=True)
        self.thread.start()

    def produce(self, batches):
        try:
            for i, batch in enumerate(batches):
                self.queue.put(self.place(batch, i % 2))
                if self.stopped:
                    return
        except BaseException as error:  # next() raises it
            self.queue.put(error)

    def place(self, batch, i):
        """Start copying a batch to the device, by buffer i. Return the copy, and the event of its arrival (CUDA)."""
        if not self.cuda:
            return batch.to(self.device), None
        self.copied[i].synchronize()  # the buffer is refilled only after its last copy has finished
        self.buffers[i].copy_(batch)
        with torch.cuda.stream(self.stream):
            batch = self.buffers[i].to(self.device, non_blocking=True)
            self.copied[i].record(self.stream)
        return batch, self.copied[i]

    def next(self):
        """Return x and y, (B, T) int64 each, on the device."""
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        batch, arrived = item
        if arrived is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(arrived)
            batch.record_stream(compute)  # otherwise the copy's stream, which owns the memory, may reuse it too early
        return batch.unbind()

    def close(self):
        self.stopped = True
        while self.thread.is_alive():
            if not self.queue.empty():
                self.queue.get_nowait()
            self.thread.join(timeout=0.01)
