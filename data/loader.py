"""Tokens to batches. Which windows make a batch is a pure function of (seed, step, micro_step, rank): there is no state
to save, prefetching cannot disturb the order, and the global batch does not depend on the number of ranks.

A batch's way: memory map -> windows of T + 1 ids -> x, all but the last id, and y, all but the first, int64 (pinned, on
CUDA) -> the device.
"""

import functools
import hashlib
import json
import math
import os
import threading
from queue import Queue

import numpy as np
import torch

from config import ConfigError, require

SPLITS = ("train", "val")
PREAD = hasattr(os, "pread")  # Windows has none
STARTS = 4096  # samples of a run whose places in the split are worked out at a time


class Dataset:
    """A prepared corpus: one memory map per split and what meta.json says of them, checked against the config."""

    def __init__(self, config):
        folder, self.notes = config.data_dir, []
        prepare = f"run python data/prepare.py {config.dataset}"
        require(folder.is_dir(), f"{folder}: no such data set; {prepare}")
        meta_file = folder / "meta.json"
        if meta_file.exists():
            try:
                self.meta = json.loads(meta_file.read_text(encoding="utf-8"))
                self.meta["tokenizer"], self.meta["vocab_size"]  # wanted later: at the first save
                dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[self.meta["dtype"]])
                counts = {
                    split: {key: int(self.meta["splits"][split][key]) for key in ("tokens", "bytes", "largest_id")}
                    for split in SPLITS
                }
            except (ValueError, KeyError, TypeError, OSError):
                raise ConfigError(f"{meta_file}: not a readable meta.json; {prepare}") from None
        else:
            require(
                not (folder / "meta.pkl").exists(),
                f"{folder}: its vocabulary is in meta.pkl, which may run code and is not read; {prepare} --input=PATH",
            )
            self.meta = {"tokenizer": {"kind": "tiktoken", "name": "gpt2"}, "vocab_size": 50257}
            dtype, counts = np.dtype("<u2"), {split: {} for split in SPLITS}
            self.notes.append(f"{folder} has no meta.json: read as nanoGPT's uint16 with GPT-2's vocabulary")
        self.files, self.tokens = {}, {}
        for split in SPLITS:
            file = folder / f"{split}.bin"
            require(file.exists(), f"{file}: missing; {prepare}")
            expected = counts[split].get("tokens")
            n_bytes = file.stat().st_size
            found, rest = divmod(n_bytes, dtype.itemsize)
            require(
                rest == 0 and expected in (None, found),
                f"{file}: {n_bytes} bytes are not {expected or 'a whole number of'} {dtype.name} tokens; {prepare}",
            )
            require(
                found > config.block_size,
                f"{file}: {found} tokens, but one window needs block_size + 1 = {config.block_size + 1}; "
                f"use more text{f' or --block_size={found - 1} at most' if found > 1 else ''}",
            )
            self.files[split] = file.open("rb")
            self.tokens[split] = np.memmap(self.files[split], dtype=dtype, mode="r")
            largest = counts[split].get("largest_id", -1)
            require(
                largest < config.vocab_size,
                f"{file}: holds id {largest}, but vocab_size={config.vocab_size}; --vocab_size={largest + 1} has it",
            )
        self.block_size, self.vocab_size, self.folder = config.block_size, config.vocab_size, folder
        self.val_bytes = counts["val"].get("bytes")

    def windows(self, split: str, starts: np.ndarray) -> np.ndarray:
        """Return the T + 1 ids at each start, (B, T + 1); an id beyond the vocabulary is an error that says where."""
        tokens, file, length = self.tokens[split], self.files[split].fileno(), self.block_size + 1
        if PREAD:  # not through the map: pages read through it count as this process's memory for as long as it lives
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
        """Return how many windows make an epoch of the training split."""
        return max(1, (len(self.tokens["train"]) - 1) // self.block_size - 1)

    def starts(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """Return where in the training split the given samples of the run begin.

        Sample i is window permute(i mod n) of epoch i // n. Windows of an epoch do not overlap and are shifted by an
        offset of the epoch's own, so that every window of the split, the last one too, can be drawn.
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
        """Return x and y of one micro-step of one rank, (2, B, T) int64."""
        micro_batch = step * config.gradient_accumulation_steps + micro_step * world_size + rank
        first, n = divmod(micro_batch * config.batch_size, STARTS)
        last = first + (n + config.batch_size - 1) // STARTS
        blocks = [self.block_of_starts(config.seed, i) for i in range(first, last + 1)]
        starts = blocks[0] if first == last else np.concatenate(blocks)
        return inputs_and_targets(self.windows("train", starts[n : n + config.batch_size]))

    @functools.lru_cache(maxsize=2)  # noqa: B019 (a data set lives as long as its run)
    def block_of_starts(self, seed: int, block: int) -> np.ndarray:
        """Return the starts of STARTS samples: one batch at a time, to work them out takes longer than to read it."""
        return self.starts(seed, block * STARTS + np.arange(STARTS))

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a validation loss in bits per byte of the raw text; None where meta.json does not count its bytes."""
        return loss / math.log(2) * len(self.tokens["val"]) / self.val_bytes if self.val_bytes else None

    def validation(self, config):
        """Yield (2, B, T) batches: all non-overlapping windows of the split, or eval_iters batches spread over it."""
        starts = np.arange((len(self.tokens["val"]) - 1) // self.block_size) * self.block_size
        wanted = None if config.eval_iters is None else config.eval_iters * config.batch_size
        if wanted is not None and wanted < len(starts):
            starts = starts[np.arange(wanted) * len(starts) // wanted]  # evenly spaced: the same at every evaluation
        for first in range(0, len(starts), config.batch_size):
            yield inputs_and_targets(self.windows("val", starts[first : first + config.batch_size]))


def inputs_and_targets(windows: np.ndarray) -> torch.Tensor:
    """Return of each window of T + 1 ids all but the last and all but the first, (2, B, T) int64."""
    n, length = windows.shape
    both = np.empty((2, n, length - 1), dtype=np.int64)
    both[0], both[1] = windows[:, :-1], windows[:, 1:]
    return torch.from_numpy(both)


def keyed(seed: int, epoch: int, purpose: str) -> int:
    """Return 64 bits that depend on nothing but the arguments, on any machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch} {purpose}".encode(), digest_size=8).digest(), "little")


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return where a keyed permutation of range(n) sends each index, in constant memory.

    A Feistel network of four rounds permutes the smallest even number of bits that holds n; whatever lands outside
    range(n) is sent through again until it is inside (cycle-walking), which keeps it a permutation.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    index = index.astype(np.uint64)
    outside = np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = index[outside] >> np.uint64(half), index[outside] & mask
        for turn in range(4):
            mixed = (right + np.uint64(key >> 16 * turn & 0xFFFF)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32) & mask)
        index[outside] = left << np.uint64(half) | right
        outside = index >= n
    return index.astype(np.int64)


class Loader:
    """Iterate (x, y) micro-batches from a step on; the next one is assembled and copied while this one computes."""

    def __init__(
        self, dataset: Dataset, config, device: torch.device, first_step: int, rank: int = 0, world_size: int = 1
    ):
        self.device, self.cuda = device, device.type == "cuda"
        micro_steps, rest = divmod(config.gradient_accumulation_steps, world_size)
        require(
            not rest,
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} does not divide by {world_size}, "
            "the number of processes",
        )
        self.buffers = self.copied = None
        if self.cuda:  # two pinned buffers with an event each: one is filled while the other's copy is under way
            shape = (2, config.batch_size, config.block_size)
            self.buffers = [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]
            self.copied = [torch.cuda.Event() for _ in range(2)]
            self.stream = torch.cuda.Stream(device)  # with the explicit device: a thread starts on device 0
        self.queue, self.stopped = Queue(maxsize=1), False
        self.thread = threading.Thread(
            target=self.produce, args=(dataset, config, first_step, micro_steps, rank, world_size)
        )
        self.thread.daemon = True
        self.thread.start()

    def produce(self, dataset, config, step, micro_steps, rank, world_size):
        try:
            turn = 0
            while not self.stopped:
                for micro_step in range(micro_steps):
                    self.queue.put(self.place(dataset.batch(config, step, micro_step, rank, world_size), turn))
                    turn ^= 1
                    if self.stopped:
                        return
                step += 1
        except BaseException as error:  # whatever it is, it is raised where the batch was wanted
            self.queue.put(error)

    def place(self, batch, turn):
        """Start a batch's way to the device; on a CPU it is there already. Return it with the event of its arrival."""
        if not self.cuda:
            return batch.to(self.device), None
        self.copied[turn].synchronize()  # the buffer is refilled only after its last copy has finished
        self.buffers[turn].copy_(batch)
        with torch.cuda.stream(self.stream):
            batch = self.buffers[turn].to(self.device, non_blocking=True)
            self.copied[turn].record(self.stream)
        return batch, self.copied[turn]

    def next(self):
        """Return x and y, (B, T) int64 each, on the device."""
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        batch, arrived = item
        if arrived is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(arrived)
            batch.record_stream(compute)  # its memory belongs to the copy's stream; do not reuse it under our feet
        return batch.unbind()

    def close(self):
        self.stopped = True
        while self.thread.is_alive():
            if not self.queue.empty():
                self.queue.get_nowait()
            self.thread.join(timeout=0.01)
