"""bench.py: what each command prints and keeps, and how a peer's checkout is run beside ours. No times are checked."""

import contextlib
import dataclasses
import json
import mmap
import sys

import numpy as np
import pytest
import torch
from torch import nn

import bench
import config as config_module
import hardware
import peer
import timing
import train
from config import Config, ConfigError
from hardware import Device

TINY = ["--device=cpu", "--shape=tiny"]
SPREAD = {"spread", "ratio", "ratio_spread"}

# A model in nanoGPT's interface and with its parameters' names, of one kind of weights: no bias, no dropout.
MODEL = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

print("what a checkout prints is no answer")


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, bias=False) for _ in range(2))
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = self.linear(c, 1, 3), self.linear(c, 1, 1)
        self.mlp.c_fc, self.mlp.c_proj = self.linear(c, 1, 4), self.linear(c, 4, 1)

    def linear(self, c, i, o):
        return nn.Linear(i * c.n_embd, o * c.n_embd, bias=False)

    def forward(self, x):
        parts = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.attn.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        assert not c.bias and c.dropout == 0
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd),
            "h": nn.ModuleList(Layer(c) for _ in range(c.n_layer)), "ln_f": nn.LayerNorm(c.n_embd, bias=False),
        })

    def forward(self, x, y=None):
        t = self.transformer
        h = t.wte(x) + t.wpe(torch.arange(x.shape[1], device=x.device))
        for layer in t.h:
            h = layer(h)
        logits = F.linear(t.ln_f(h), t.wte.weight)
        return logits, None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=None):
        assert temperature == 1.0 and top_k == 1
        for _ in range(n):
            idx = torch.cat((idx, self(idx)[0][:, -1:].argmax(-1)), 1)
        return idx
"""
TRAIN = """
raise SystemExit("a script: it must not run when its function is wanted")


def get_batch(split):
    tokens = np.fromfile(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16).astype(np.int64)
    rows = torch.from_numpy(tokens).unfold(0, block_size + 1, 1)[torch.randint(len(tokens) - block_size, (batch_size,))]
    return rows[:, :-1].to(device), rows[:, 1:].to(device)
"""


@pytest.fixture
def checkout(tmp_path):
    """Return the folder of a peer."""
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Spare the pauses and the ceilings of this machine."""
    monkeypatch.setattr(peer, "PAUSE", 0)
    monkeypatch.setattr(peer, "WARM_UP", 2)
    monkeypatch.setattr(bench, "matmul_flops", lambda device, dtype, n: 1e9 * n)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 2e9)


def rows_of(capsys, *argv):
    assert bench.main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert set(found) == {"command", "device", "torch", "threads", "rows"} and found["command"] == argv[0]
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    for row in found["rows"]:
        for key, value in row.items():
            assert not key.endswith(("_s", "seconds", "ratio", "bytes")) or value is None or value > 0, key
            assert "spread" not in key or value[0] <= value[1]
    return found["rows"]


def config_of(folder, **settings):
    shape = dict(zip(bench.SHAPE, bench.SHAPES["tiny"], strict=True)) | {"gradient_accumulation_steps": 1}
    settings = shape | {"dtype": "float32", "device": "cpu", "dataset": str(folder)} | settings
    return config_module.resolve(Config(**settings), Device("a CPU", "cpu"))


# --- ceilings


def test_ceilings_are_printed_and_kept(monkeypatch, capsys, quick):
    kept = []
    monkeypatch.setattr(hardware, "write_local", kept.append)
    monkeypatch.setattr(timing, "operation_seconds", lambda op, device: [1e-3])
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=2", "--vocab_size=65"]
    rows = {row["what"]: row["value"] for row in rows_of(capsys, "ceilings", "--device=cpu", *tiny)}
    assert rows["matmul of 2048 cubed, float32"] == 2048e9 and rows["copy, bytes read and written"] == 2e9
    assert kept[0].peak("float32") == 2048e9 and kept[0].bandwidth == 2e9
    assert rows["operations timed"] == sum(map(len, kept[0].op_times.values())) > 30
    assert bench.main(["ceilings", "--device=cpu", *tiny]) == 0
    assert "matmul of 256 cubed" in capsys.readouterr().out


# --- the others


def test_train_beside_a_peer_and_its_record(checkout, capsys, quick, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "RECORDS", tmp_path / "records")
    argv = ["train", *TINY, "--steps=1", "--repetitions=2", f"--peer={checkout}", "--record=here"]
    (row,) = rows_of(capsys, *argv)
    keys = {"shape", "dtype", "tokens_per_s", "step_s", "mfu", "peak_bytes", *SPREAD}
    assert set(row) == keys | {"peer_tokens_per_s", "peer_peak_bytes", "memory_ratio"}
    assert row["shape"] == "tiny" and np.isclose(row["tokens_per_s"] * row["step_s"], 12 * 64)
    assert np.isclose(row["memory_ratio"], row["peak_bytes"] / row["peer_peak_bytes"])
    kept = json.loads((tmp_path / "records" / "here.json").read_text(encoding="utf-8"))
    assert set(kept) == {"commit", "command", "date", "environment", "rows"} and kept["rows"] == [row]
    assert kept["command"].startswith("python bench.py train --device=cpu --shape=tiny")
    assert set(kept["environment"]) == {"device", "torch", "threads", "peer"}


def test_train_prints_a_table(capsys, quick):
    assert bench.main(["train", *TINY, "--steps=1", "--repetitions=1"]) == 0
    _, titles, row = capsys.readouterr().out.splitlines()
    assert titles.split() == ["shape", "dtype", "tokens_per_s", "step_s", "spread", "mfu", "peak_bytes"]
    assert row.startswith("tiny") and len(row) == len(titles) and row.endswith("MiB")


def test_our_side_takes_the_steps_that_train_py_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "with_ceiling", lambda record, device, dtype: record)
    peer.write_tokens(tmp_path, 65, 5000)
    settings = {"max_iters": 4, "warmup_iters": 2, "eval_iters": 1, "sample_tokens": 0, "learning_rate": 1e-2}
    config = config_of(tmp_path, **settings, out_dir=str(tmp_path / "out"))
    argv = [f"--{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config)]
    assert train.main(argv) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expected = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    side = peer.Training(config)
    assert side.run(3)["losses"] + side.run(1)["losses"] == expected
    side.loader.close()


def test_the_peers_side_trains(checkout, tmp_path):
    peer.write_tokens(tmp_path, 65, 5000)
    torch.manual_seed(0)
    side = peer.PeerTraining(config_of(tmp_path, warmup_iters=0, learning_rate=1e-2), checkout)
    before = side.model.transformer.wpe.weight.clone()
    losses = side.run(2)["losses"]
    assert len(losses) == 2 and all(map(np.isfinite, losses)) and not before.equal(side.model.transformer.wpe.weight)
    assert all(p.grad is None for p in side.model.parameters())
    x, y = side.batch
    assert x.shape == y.shape == (12, 64) and x[:, 1:].equal(y[:, :-1])


def test_optimizer(capsys):
    (row,) = rows_of(capsys, "optimizer", *TINY, "--steps=1", "--repetitions=2")
    assert set(row) == {"shape", "parameters", "step_s", "fused_s", "foreach_s", "foreach_ratio", *SPREAD}
    assert row["parameters"] == sum(p.numel() for p in bench.build(config_of("x/y")).parameters())


def test_loader(checkout, capsys, quick):
    argv = ["loader", "--device=cpu", "--steps=2", "--repetitions=2", "--gigabytes=1e-3"]
    (row,) = rows_of(capsys, *argv, f"--peer={checkout}")
    assert set(row) == {"shape", "file_bytes", "batch_s", "peer_batch_s", *SPREAD} and row["file_bytes"] == 10**6


def test_decode_writes_the_peers_tokens_with_the_same_weights(checkout, capsys, quick):
    rows = rows_of(capsys, "decode", *TINY, "--dtype=float32", "--repetitions=1", f"--peer={checkout}")
    (row,) = rows  # one dtype
    keys = {"shape", "dtype", "tokens_per_s", "seconds", "prefill_s", "step_s", "mbu", *SPREAD}
    assert set(row) == keys | {"peer_tokens_per_s", "same_tokens"} and row["same_tokens"] is True


def test_without_a_peer_its_columns_are_absent(capsys, quick, monkeypatch):
    figures = {"seconds": 1.0, "peak_bytes": 1, "prefill_s": 0.5, "step_s": 0.1, "tokens": []}

    class Fake:
        turn = staticmethod(lambda n: figures)

    monkeypatch.setattr(peer, "Side", lambda *_: contextlib.nullcontext(Fake()))
    for name in ("train", "loader", "decode"):
        for row in rows_of(capsys, name, "--device=cpu", *(["--gigabytes=1e-3"] if name == "loader" else [])):
            assert "spread" in row and not [key for key in row if "peer" in key or "ratio" in key]


def test_prepare(capsys, gpt2_vocabulary, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"Text number {i}, of some words.\n" * 50, encoding="utf-8")
    (row,) = rows_of(capsys, "prepare", f"--input={tmp_path}", "--repetitions=1")
    keys = {"workers", "text_bytes", "bytes_per_s", "seconds", "peak_bytes", "tiktoken_bytes_per_s"}
    assert set(row) == keys | SPREAD and row["text_bytes"] == 3 * 50 * 30 and row["workers"] is None


def test_the_text_that_tiktoken_gets_is_what_was_prepared(gpt2_vocabulary, tmp_path):
    vocabulary = bench.tokenizer.load("gpt2")
    documents = [["A first one. " * 10000, "A second"], ["A third, <|endoftext|> spelled out"]]
    for file, texts in zip(("train.bin", "val.bin"), documents, strict=True):
        ids = [i for text in texts for i in [*vocabulary.encode_ordinary(text), vocabulary.eot_token]]
        np.array(ids, dtype="<u2").tofile(tmp_path / file)
    found = bench.pieces(tmp_path, vocabulary)
    assert "".join(found) == "".join(documents[0] + documents[1]) and max(map(len, found)) == 2**16


def test_startup(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "milestones", lambda line: seen.append(line) or (1.0, 2.0, len(seen)))
    rows = rows_of(capsys, "startup", "--device=cpu", "--repetitions=2")
    assert [row["program"] for row in rows] == ["import torch", "train.py tiny", "accounting.py"]
    assert set(rows[0]) == {"program", "first_line_s", "first_step_s", "end_s", "spread"}
    assert [row["end_s"] for row in rows] == [5.5, 6.5, 7.5], "the first round does not count"
    config, options = config_module.load(seen[1][1:], train.Options)
    config_module.check(config)
    assert options.overwrite and config.max_iters == 1 and config.n_embd == 128


def test_milestones_of_a_program(monkeypatch, tmp_path):
    first, step, end = bench.milestones(["-c", "print('device'); print('step 1/1 | loss')"])
    assert 0 < first <= step <= end
    assert bench.milestones(["-c", "pass"])[:2] == (None, None)
    with pytest.raises(ConfigError, match="failed"):
        bench.milestones(["-c", "raise SystemExit(3)"])


@pytest.mark.slow
def test_startup_of_the_programs_as_they_are(capsys):
    rows = rows_of(capsys, "startup", "--device=cpu", "--repetitions=1")
    assert [row["first_line_s"] is None for row in rows] == [True, False, False]
    assert [row["first_step_s"] is None for row in rows] == [True, False, True]


# --- turns and figures


def test_sides_take_turns_after_some_steps_that_do_not_count(monkeypatch):
    monkeypatch.setattr(peer, "PAUSE", 0)
    calls = []

    def run(name):
        return lambda n: calls.append((name, n)) or {"seconds": 0.25 * n}

    n, found = peer.turns([run("a"), run("b")], None, 2, lambda: calls.append("before") or 7)
    assert n == 8 and [first for first, *_ in found] == [7, 7], "two seconds of 0.25"
    w = peer.WARM_UP
    assert calls == [("a", w), ("b", w), ("a", 1), *["before", ("a", 8), ("b", 8)] * 2]
    assert peer.turns([run("a")], 3, 1) == (3, [(None, {"seconds": 0.75})])


def test_ratios_are_of_pairs_and_their_median_is_reported():
    ours, theirs = [1.0, 2.0, 4.0], [2.0, 2.0, 12.0]
    assert peer.compared(ours, theirs) == {"ratio": 2.0, "ratio_spread": [1.0, 3.0]}
    assert peer.spread([3, 1, 2]) == [1, 3]


def test_prompts_leave_room():
    assert peer.continued(Config()) == (900, 64)
    assert peer.continued(Config(block_size=64)) == (48, 16)


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("tokens_per_s", 12345.6, "12,346"), ("bytes_per_s", 2.5e6, "2.5 MB/s"), ("peak_bytes", 2**20, "1.0 MiB"),
        ("step_s", 0.123456, "0.1235"), ("mfu", 0.4, "40.0%"), ("memory_ratio", 0.5, "0.500"),
        ("shape", "tiny", "tiny"), ("spread", [1.0, 2.0], "1..2"),
        ("same_tokens", True, "yes"), ("workers", None, "-"), ("workers", 2, "2"),
    ],
)  # fmt: skip
def test_figures_as_text(key, value, text):
    assert bench.cell(key, value) == text


def test_peak_memory_is_what_came_after_idle():
    here = torch.device("cpu")
    idle = peer.idle_memory(here)
    with mmap.mmap(-1, 2**26) as block:
        block.write(bytes(2**26))
    assert peer.peak_memory(here) - idle > 0.9 * 2**26
    if sys.platform == "linux":
        pid = peer.os.getpid()
        assert pid in bench.tree(pid) and bench.proportional_bytes(pid) > 2**26


def test_weights_are_copied_by_name(checkout):
    config = config_of("x/y")
    ours, theirs = bench.build(config), peer.peer_model(config, checkout)
    ours.init_weights(0)
    with torch.no_grad():
        for own, other in peer.matched(ours, theirs):
            other.copy_(own)
    idx = torch.arange(20).view(2, 10)
    torch.testing.assert_close(ours(idx), theirs(idx)[0])
    theirs.more = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="1 parameters more"):
        peer.matched(ours, theirs)
    with pytest.raises(ConfigError, match="has no transformer"):
        peer.matched(ours, nn.Linear(2, 2))


def test_from_a_peers_weights_on_its_batches_the_losses_are_its_own(checkout, tmp_path):
    peer.write_tokens(tmp_path, 65, 5000)
    config = config_of(tmp_path, warmup_iters=3, learning_rate=1e-2, lr_decay_iters=20, weight_decay=0.0)
    theirs, ours = zip(*peer.follow(config, checkout, 20), strict=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert max(theirs) - min(theirs) > 0.01 and len(set(theirs)) == 20


# --- mistakes


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "a command is wanted"),
        (["ceiling"], "ceiling"),
        (["ceilings", "--jsn"], "did you mean json"),
        (["ceilings", "no.py"], "no.py"),
        (["ceilings", "--steps=3"], "--steps: ceilings does nothing with it"),
        (["startup", "--peer=x"], "--peer: startup does nothing with it"),
        (["train", "--n_layer=3"], "has its own shapes"),
        (["train", "--shape=tiny,huge"], "there are tiny, small"),
        (["train", "--repetitions=0"], "at least 1"),
        (["train", "--record=a/b"], "without slashes"),
        (["train", "--peer=/no/such"], "--peer=/no/such: no nanoGPT checkout"),
        (["prepare", "--workers=two"], "numbers such as 1,2"),
        (["loader", "--gigabytes=0"], "must be positive"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, words, capsys):
    assert bench.main(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "file, text, words",
    [
        ("model.py", "class GPT: pass", "no model.py with GPTConfig"),
        ("model.py", "this is no Python", "no model.py with GPT and GPTConfig"),
        ("train.py", "", "no train.py with get_batch"),
    ],
)
def test_what_lies_at_peer_must_be_a_checkout(checkout, capsys, file, text, words):
    (checkout / file).write_text(text, encoding="utf-8")
    assert bench.main(["train", f"--peer={checkout}"]) == 2
    assert words in capsys.readouterr().err


def test_a_peer_that_fails_is_named_in_one_line(checkout, capsys, quick):
    text = TRAIN.replace("np.fromfile(", "nothing(")
    (checkout / "train.py").write_text(text, encoding="utf-8")
    assert bench.main(["loader", "--device=cpu", "--gigabytes=1e-3", f"--peer={checkout}", "--json"]) == 2
    error = capsys.readouterr().err
    assert error == "error: the peer: NameError: name 'nothing' is not defined\n"


def test_a_side_that_dies_is_named_in_one_line(tmp_path, monkeypatch):
    peer.write_tokens(tmp_path, 65, 5000)
    with peer.Side("loader", config_of(tmp_path)) as side:
        side.process.kill()
        side.process.wait()
        with pytest.raises(ConfigError, match="napkin: its process ended with status -9"):
            side.turn(1)
