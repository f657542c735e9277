"""Batches are a pure function of (seed, step, micro_step, rank): every window is drawn, once an epoch, by any number of
ranks, in an order that nothing disturbs. Data that does not fit the config is refused: what, where, the way out.
"""

import contextlib
import dataclasses
import itertools
import math
import threading
import time

import numpy as np
import pytest
import torch

import data.loader
from cli.errors import ConfigError
from data.loader import Dataset, Loader, keyed, permute
from measure.memory import process_memory

CPU = torch.device("cpu")


def refused(config):
    with pytest.raises(ConfigError) as caught:
        Dataset(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def epoch_starts(dataset, epoch, seed=1):
    n = dataset.epoch_windows()
    return dataset.starts(seed, np.arange(epoch * n, (epoch + 1) * n))


# --- which windows


@pytest.mark.parametrize("length, windows", [(5, 1), (6, 1), (9, 1), (12, 1), (13, 2), (16, 2), (17, 3), (41, 9)])
def test_every_legal_window_is_drawn_and_no_other(corpus, length, windows):
    """block_size + 1 tokens are one window; of 0 .. 7 with a block of 4, offsets 0 .. 3, whose last target is 7."""
    dataset = Dataset(corpus(train=length))
    assert dataset.epoch_windows() == windows
    drawn = dataset.starts(1, np.arange(400 * windows))
    assert set(drawn.tolist()) == set(range(length - 4))
    batch = dataset.windows("train", drawn)
    assert (batch == drawn[:, None] + np.arange(5)).all()
    assert batch.max() == length - 1  # the last token is a target


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_a_split_shorter_than_a_window_is_refused(corpus, split, length, tmp_path):
    way_out = f" or --block_size={length - 1} at most" if length > 1 else ""
    assert refused(corpus(**{split: length})) == (
        f"{tmp_path / split}.bin: {length} tokens, but one window needs block_size + 1 = 5; use more text{way_out}"
    )
    if length > 1:
        Dataset(corpus(**{split: length}, block_size=length - 1))


@pytest.mark.parametrize("length", [13, 100, 1001])
def test_an_epoch_draws_windows_that_do_not_overlap(corpus, length):
    dataset = Dataset(corpus(train=length))
    offsets = []
    for epoch in range(5):
        starts = np.sort(epoch_starts(dataset, epoch))
        assert (np.diff(starts) == 4).all()  # each once, side by side
        assert len(starts) * 4 > length - 1 - 3 * 4  # fewer than three windows' worth are left for another epoch
        offsets.append(starts[0])
    assert len(set(offsets)) > 1


def test_epochs_and_seeds_have_orders_of_their_own(corpus):
    dataset = Dataset(corpus(train=1001))
    orders = [epoch_starts(dataset, epoch, seed) // 4 for epoch in range(4) for seed in (1, 2)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.1
    for order in orders:
        assert (np.diff(order) == 1).mean() < 0.1


@pytest.mark.parametrize("n", [*range(1, 201), 255, 256, 257, 4095, 4097, 65537, 100003])
def test_permute_is_a_permutation(n):
    for key in (0, 1, 2**64 - 1, keyed(1, 2, "order")):
        assert (np.sort(permute(np.arange(n), n, key)) == np.arange(n)).all()


def test_permute_depends_on_every_part_of_its_key():
    n = 10007
    keys = [0, *(1 << bit for bit in range(64))]
    orders = [permute(np.arange(n), n, key) for key in keys]
    for order in orders[1:]:
        assert (order == orders[0]).mean() < 0.1
    assert len({order.tobytes() for order in orders}) == len(keys)


def test_permute_needs_no_array_of_its_range():
    n = 2**40 + 1
    start = time.perf_counter()
    sent = permute(np.array([0, 1, n - 1]), n, 7)
    assert len(set(sent.tolist())) == 3 and (sent >= 0).all() and (sent < n).all()
    assert permute(np.array([n - 1, 0]), n, 7).tolist() == [sent[2], sent[0]]  # whatever is asked for beside it
    assert time.perf_counter() - start < 1


def test_permute_spreads_evenly():
    """Over many keys, each index is sent everywhere about equally often."""
    n, keys = 10, 2000
    sent = np.array([permute(np.arange(n), n, keyed(0, key, "order")) for key in range(keys)])
    counts = np.array([np.bincount(column, minlength=n) for column in sent.T])
    chi_squared = ((counts - keys / n) ** 2 / (keys / n)).sum(axis=1)
    assert (chi_squared < 33.7).all()  # 9 degrees of freedom: 1 in 10,000 for one index


# --- which batches


def test_the_global_batch_does_not_depend_on_the_number_of_ranks(corpus):
    config = corpus(train=200)
    dataset = Dataset(config)
    for step in (0, 1, 11, 12):
        batches = {}
        for world_size in (1, 2, 4):
            micro_steps = config.gradient_accumulation_steps // world_size
            batches[world_size] = [
                dataset.batch(config, step, micro_step, rank, world_size)
                for micro_step in range(micro_steps)
                for rank in range(world_size)
            ]
        for world_size in (2, 4):
            assert torch.equal(torch.cat(batches[world_size], 1), torch.cat(batches[1], 1))
        per_rank = [torch.cat(batches[4][rank::4], 1) for rank in range(4)]
        assert len({part.numpy().tobytes() for part in per_rank}) == 4


def test_steps_walk_through_each_epoch_once(corpus):
    """49 windows an epoch and 8 a step: batches run over the epoch's end without a gap, a repeat or a short batch."""
    config = corpus(train=201)
    dataset = Dataset(config)
    assert dataset.epoch_windows() == 49
    batches = [dataset.batch(config, step, micro_step) for step in range(49) for micro_step in range(4)]
    assert {tuple(batch.shape) for batch in batches} == {(2, 2, 4)}
    starts = torch.cat(batches, 1)[0, :, 0].numpy()
    assert (starts.reshape(8, 49) == [epoch_starts(dataset, epoch) for epoch in range(8)]).all()


def test_a_batch_larger_than_an_epoch(corpus):
    config = corpus(train=14, batch_size=7)
    dataset = Dataset(config)
    assert dataset.epoch_windows() == 2
    starts = dataset.batch(config, 0, 0)[0, :, 0].tolist()
    assert len(starts) == 7 and [abs(starts[i] - starts[i + 1]) for i in (0, 2, 4)] == [4, 4, 4]


@pytest.mark.parametrize("block", [1, 3, 4, 7, 8, 9, 5000])
def test_how_many_starts_are_worked_out_at_a_time_does_not_matter(corpus, block, monkeypatch):
    config = corpus(train=300, batch_size=4)
    expected = [Dataset(config).batch(config, step, micro_step) for step in range(30) for micro_step in range(4)]
    monkeypatch.setattr(data.loader, "STARTS", block)
    dataset = Dataset(config)
    found = [dataset.batch(config, step, micro_step) for step in range(30) for micro_step in range(4)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_without_pread_the_same_is_read_from_the_map(corpus, monkeypatch):
    config = corpus(train=300)
    dataset = Dataset(config)
    expected = [dataset.batch(config, step, 0) for step in range(9)]
    monkeypatch.setattr(data.loader, "PREAD", False)
    assert torch.equal(torch.stack([dataset.batch(config, step, 0) for step in range(9)]), torch.stack(expected))


def test_a_batch_does_not_depend_on_what_was_asked_before(corpus):
    config = corpus(train=300)
    one, other = Dataset(config), Dataset(config)
    places = [(step, micro_step) for step in range(6) for micro_step in range(4)]
    forwards = {place: one.batch(config, *place) for place in places}
    for place in reversed(places):
        np.random.seed(0)
        torch.manual_seed(0)
        assert torch.equal(other.batch(config, *place), forwards[place])
        list(other.validation(config))
    differently = dataclasses.replace(config, seed=2)
    assert not torch.equal(one.batch(differently, 0, 0), forwards[0, 0])


def test_batches_are_what_they_were():
    """Resuming an old run needs the old order: these figures change only with a note to the users."""
    assert [keyed(1337, 0, "order"), keyed(1337, 3, "offset")] == [8764169004886894268, 6579187497440608294]
    assert permute(np.arange(10), 10, 1337).tolist() == [3, 2, 1, 0, 4, 5, 6, 7, 8, 9]


def take(loader, n):
    try:
        return [loader.next() for _ in range(n)]
    finally:
        loader.close()


def equal(ones, others):
    return len(ones) == len(others) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(ones, others, strict=True)
    )


def test_x_and_y_are_a_batch_shifted_by_one(corpus):
    config = corpus(train=100)
    dataset = Dataset(config)
    for i, (x, y) in enumerate(take(Loader(dataset, config, CPU, first_step=3), 9)):
        batch = dataset.batch(config, 3 + i // 4, i % 4)
        assert x.shape == y.shape == (2, 4) and x.dtype == y.dtype == torch.int64
        assert torch.equal(torch.stack((x, y)), batch) and torch.equal(y, x + 1)
        assert x.is_contiguous() and y.is_contiguous()


@pytest.mark.parametrize("world_size, rank", [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_a_loader_started_at_a_step_goes_on_as_if_never_stopped(corpus, world_size, rank):
    config = corpus(train=100)
    dataset = Dataset(config)
    per_step = config.gradient_accumulation_steps // world_size
    straight = take(Loader(dataset, config, CPU, 0, rank, world_size), 20 * per_step)
    for step in (1, 7, 19):  # among them some beyond the first epoch's end
        resumed = take(Loader(Dataset(config), config, CPU, step, rank, world_size), (20 - step) * per_step)
        assert equal(resumed, straight[step * per_step :])


@pytest.mark.parametrize("depth", [1, 4, 64])
def test_the_depth_of_prefetching_does_not_matter(corpus, depth, monkeypatch):
    config = corpus(train=100)
    dataset = Dataset(config)
    expected = [dataset.batch(config, step, micro_step) for step in range(5) for micro_step in range(4)]
    queue = data.loader.Queue
    monkeypatch.setattr(data.loader, "Queue", lambda maxsize: queue(depth))
    loader = Loader(dataset, config, CPU, 0)
    deadline = time.monotonic() + 5
    while not loader.queue.full() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loader.queue.qsize() == depth
    assert equal(take(loader, 20), expected)


def test_accumulation_that_the_ranks_cannot_share_is_refused(corpus):
    config = corpus(gradient_accumulation_steps=5)
    with pytest.raises(ConfigError, match=r"^gradient_accumulation_steps=5 does not divide by 2, the number of proc"):
        Loader(Dataset(config), config, CPU, 0, world_size=2)


# --- validation


@pytest.mark.parametrize("length", [5, 8, 9, 40, 41, 42, 100])
def test_the_whole_of_validation_is_windows_side_by_side(corpus, length):
    config = corpus(val=length, eval_iters=None)
    batches = list(Dataset(config).validation(config))
    starts = torch.cat(batches, 1)[0, :, 0].tolist()
    assert starts == list(range(0, 4 * ((length - 1) // 4), 4))
    targets = torch.cat(batches, 1)[1].flatten().tolist()
    assert targets == list(range(1, len(targets) + 1)) and 0 <= length - 1 - len(targets) < 4
    assert {batch.shape[1] for batch in batches[:-1]} <= {2} and 1 <= batches[-1].shape[1] <= 2


@pytest.mark.parametrize("eval_iters", [1, 3, 7, 24])
def test_a_sample_of_validation_is_fixed_and_spread_evenly(corpus, eval_iters):
    config = corpus(val=402, eval_iters=eval_iters, batch_size=4)  # 100 windows
    dataset = Dataset(config)
    batches = list(dataset.validation(config))
    assert len(batches) == eval_iters and {tuple(batch.shape) for batch in batches} == {(2, 4, 4)}
    windows = torch.cat(batches, 1)[0, :, 0].numpy() // 4
    assert (torch.cat(batches, 1)[0, :, 0].numpy() % 4 == 0).all()  # windows of the whole split's
    gaps = np.diff([*windows, windows[0] + 100])
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1
    dataset.batch(config, 5, 0)
    again = list(Dataset(dataclasses.replace(config, seed=9)).validation(config))
    assert all(torch.equal(one, other) for one, other in zip(batches, again, strict=True))


def test_a_sample_larger_than_the_split_is_the_split(corpus):
    config = corpus(val=100, eval_iters=200)
    whole = dataclasses.replace(config, eval_iters=None)
    dataset = Dataset(config)
    assert equal(list(dataset.validation(config)), list(dataset.validation(whole)))


def test_bits_per_byte(corpus):
    """ln 2 nats a token is a bit a token; 30 tokens of 60 bytes are half a token a byte."""
    assert Dataset(corpus(val=30)).bits_per_byte(math.log(2)) == pytest.approx(0.5)
    assert Dataset(corpus(val=30)).bits_per_byte(8 * math.log(2)) == pytest.approx(4)


def test_bits_per_byte_are_unknown_without_a_count_of_bytes(corpus):
    config = corpus(meta=False)
    assert Dataset(config).bits_per_byte(1.0) is None


# --- data that does not fit


def test_a_missing_folder_or_split_names_the_command_that_makes_it(corpus, tmp_path):
    config = corpus()
    missing = tmp_path / "missing"
    assert refused(dataclasses.replace(config, dataset=str(missing))) == (
        f"{missing}: no such data set; run python data/prepare.py {missing}"
    )
    for split in ("val", "train"):
        (tmp_path / f"{split}.bin").unlink()
        assert refused(config) == f"{tmp_path / split}.bin: missing; run python data/prepare.py {tmp_path}"


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_of_another_width_or_length_is_refused(corpus, tmp_path, split):
    file, prepare = tmp_path / f"{split}.bin", f"run python data/prepare.py {tmp_path}"
    config = corpus()
    file.write_bytes(np.arange(40, dtype="<u4").tobytes())  # twice as wide as meta.json says
    assert refused(config) == f"{file}: 160 bytes are not 40 uint16 tokens; {prepare}"
    file.write_bytes(bytes(79))  # cut
    assert refused(config) == f"{file}: 79 bytes are not 40 uint16 tokens; {prepare}"
    config = corpus(dtype="uint32")
    file.write_bytes(np.arange(40, dtype="<u2").tobytes())
    assert refused(config) == f"{file}: 80 bytes are not 40 uint32 tokens; {prepare}"
    config = corpus(meta=False)
    (tmp_path / "meta.json").unlink()
    file.write_bytes(bytes(79))
    assert refused(config) == f"{file}: 79 bytes are not a whole number of uint16 tokens; {prepare}"


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_beyond_the_vocabulary_are_refused_at_the_start(corpus, tmp_path, split):
    config = corpus(**{split: [0, 1, 2, 70, 4, 5]}, vocab_size=65)
    assert refused(config) == f"{tmp_path / split}.bin: holds id 70, but vocab_size=65; use --vocab_size=71"
    assert "holds id 70, but vocab_size=70" in refused(dataclasses.replace(config, vocab_size=70))
    Dataset(dataclasses.replace(config, vocab_size=71))


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_beyond_the_vocabulary_are_found_where_meta_json_does_not_tell(corpus, tmp_path, split):
    """As after a change of the file behind meta.json's back: an embedding would be read out of bounds."""
    config = corpus(**{split: np.zeros(41)}, eval_iters=None, vocab_size=40)
    ids = np.zeros(41, dtype="<u2")
    ids[17] = 40  # one too many: 39 is the last
    (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    dataset = Dataset(config)
    message = (
        f"{tmp_path / split}.bin: id 40 at token 17 is beyond vocab_size=40; the data was made with another tokenizer"
    )
    with pytest.raises(ConfigError) as caught:
        for step in range(20):
            _ = list(dataset.validation(config)) if split == "val" else dataset.batch(config, step, 0)
    assert str(caught.value) == message
    if split == "train":  # in the loader's thread too, and raised where the batch was wanted
        with pytest.raises(ConfigError) as caught:
            take(Loader(dataset, config, CPU, 0), 80)
        assert str(caught.value) == message


def test_wide_ids(corpus):
    config = corpus(train=[65535, 65536, 100256, 2**31, 3, 2**32 - 1], dtype="uint32", vocab_size=2**32)
    windows = Dataset(config).windows("train", np.array([0, 1]))
    assert windows.tolist() == [[65535, 65536, 100256, 2**31, 3], [65536, 100256, 2**31, 3, 2**32 - 1]]
    batch = data.loader.inputs_and_targets(windows)
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[row[:-1] for row in windows.tolist()], [row[1:] for row in windows.tolist()]]
    narrow = corpus(train=[65535, 0, 1, 2, 3], vocab_size=65536)
    assert Dataset(narrow).windows("train", np.array([0])).tolist() == [[65535, 0, 1, 2, 3]]


def test_reading_a_large_file_does_not_grow_the_process(tmp_path, corpus):
    config = corpus(block_size=1024, batch_size=64, val=1025, train=1025, meta=False)
    n_bytes = 64 * 2**20
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(n_bytes)
    dataset = Dataset(config)
    dataset.batch(config, 0, 0)
    before = process_memory(CPU)
    for first in range(0, n_bytes // 2 - 65 * 1024, 64 * 1024):
        dataset.windows("train", np.arange(first, first + 64 * 1024, 1024))
    assert process_memory(CPU) - before < n_bytes / 8


# --- the loader's thread


def test_an_error_in_the_thread_is_raised_where_the_batch_was_wanted(corpus):
    config = corpus()
    dataset = Dataset(config)
    whole = dataset.batch

    def batch(config, step, *place):
        if step == 2:
            raise OSError("the disk went away")
        return whole(config, step, *place)

    dataset.batch = batch
    loader = Loader(dataset, config, CPU, 0)
    for _ in range(8):
        loader.next()
    with pytest.raises(OSError, match="the disk went away"):
        loader.next()
    loader.close()
    assert not loader.thread.is_alive()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread(corpus, taken):
    config = corpus()
    before = threading.active_count()
    loader = Loader(Dataset(config), config, CPU, 0)
    take(loader, taken)
    assert not loader.thread.is_alive() and threading.active_count() == before
    loader.close()  # twice is no harm


class FakeStream:
    """A CUDA stream as slow as one may be: nothing on it runs before the host waits for it, or the program ends."""

    def __init__(self, device):
        assert device == torch.device("cuda", 1)  # not the thread's current device, which is 0
        self.copies, self.waited_for = [], []

    def wait_event(self, event):
        self.waited_for += event.copies  # the host goes on at once


class FakeEvent:
    def __init__(self):
        self.copies = []

    def record(self, stream):
        self.copies = list(stream.copies)

    def synchronize(self):
        for copy in self.copies:
            copy.run()


class FakeCopy:
    """A batch on its way to the device: when it runs, once, it reads what its buffer holds by then."""

    def __init__(self, buffer):
        self.buffer, self.ids, self.streams = buffer, None, []

    def run(self):
        if self.ids is None:
            self.ids = self.buffer.ids
        return self.ids

    def record_stream(self, stream):
        self.streams.append(stream)

    def unbind(self):
        (compute,) = self.streams  # named, or the batch's memory might be reused while it is read
        assert self in compute.waited_for, "read before its copy has arrived"
        return FakeHalf(self, 0), FakeHalf(self, 1)


class FakeHalf:
    """What the computing stream reads of a batch, when its turn comes."""

    def __init__(self, copy, which):
        self.copy, self.which = copy, which

    def value(self):
        return self.copy.run()[self.which]


class FakeBuffer:
    def __init__(self, streams, shape):
        self.streams, self.shape, self.ids = streams, shape, None

    def copy_(self, batch):
        assert batch.shape == self.shape
        self.ids = batch.clone()

    def to(self, device, non_blocking):
        assert device == torch.device("cuda", 1) and non_blocking
        copy = FakeCopy(self)
        self.streams[-1].copies.append(copy)
        return copy


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let the loader find a CUDA device whose copies are as late as they may be; return the buffers it pins."""
    streams, buffers = [], []  # the stream whose turn it is stands last
    compute = FakeStream(torch.device("cuda", 1))

    @contextlib.contextmanager
    def turn_of(stream):
        streams.append(stream)
        yield
        streams.pop()

    def empty(shape, dtype, pin_memory):
        assert pin_memory and dtype == torch.int64
        buffers.append(FakeBuffer(streams, shape))
        return buffers[-1]

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", turn_of)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    return buffers


def test_on_cuda_two_pinned_buffers_take_turns(corpus, fake_cuda):
    """A buffer is refilled only after its copy has finished, and nothing reads a batch before it has arrived."""
    config = corpus(train=100)
    dataset = Dataset(config)
    loader = Loader(dataset, config, torch.device("cuda", 1), 0)
    batches = take(loader, 20)
    assert len(fake_cuda) == 2 and len(set(loader.copied)) == 2
    assert {copy.buffer for copy in loader.stream.copies} == set(fake_cuda)
    expected = [dataset.batch(config, step, micro_step) for step in range(5) for micro_step in range(4)]
    arrived = [(x.value(), y.value()) for x, y in batches]
    assert equal(arrived, expected)
