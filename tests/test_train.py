"""Training: resuming, what is logged and measured, the preflight, the ledger, the answers to a user's mistakes."""

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import config as config_module
import hardware
import ledger
import measure
import optimizer
import train
import trainer
from config import Config, ConfigError, read_file
from hardware import Device

PEAK = 1e11  # FLOP/s that these tests take their device to have
TINY = {
    "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 4, "gradient_accumulation_steps": 1,
    "compile_optimizer": False, "max_iters": 4, "warmup_iters": 2, "lr_decay_iters": 20, "learning_rate": 1e-3,
    "min_lr": 1e-4, "eval_interval": 100, "eval_iters": 2, "device": "cpu", "dtype": "float32", "sample_tokens": 0,
}  # fmt: skip
STEP_KEYS = {
    "step", "loss", "lr", "grad_norm", "step_s", "data_wait_s", "tokens_per_s", "mfu", "peak_source", "memory_bytes",
}  # fmt: skip


def write_data(folder, train_ids, val_ids, tokenizer, vocab_size):
    """Write ids as a prepared corpus."""
    folder.mkdir(parents=True)
    splits = {}
    for split, ids in (("train", train_ids), ("val", val_ids)):
        ids = np.asarray(ids, dtype="<u2")
        ids.tofile(folder / f"{split}.bin")
        splits[split] = {"tokens": len(ids), "bytes": 2 * len(ids), "largest_id": int(ids.max())}
    meta = {"format": 1, "dtype": "uint16", "vocab_size": vocab_size, "tokenizer": tokenizer, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def letters(n):
    """Return n ids, a reproducible walk through the letters: text that is neither constant nor noise."""
    steps = np.random.default_rng(0).integers(1, 4, n)
    return 97 + np.cumsum(steps) % 26


@pytest.fixture(autouse=True)
def known_peak(monkeypatch):
    """Spare each run the measurement of this machine's peak."""

    def with_ceiling(record, device, dtype):
        return dataclasses.replace(record, peak_flops={dtype: PEAK}, source="a test")

    monkeypatch.setattr(train, "with_ceiling", with_ceiling)
    monkeypatch.setattr(train, "what_slows_cpus", lambda: [])  # tests load the cores themselves
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a prepared folder of bytes, 25 windows of 16 tokens an epoch."""
    folder = tmp_path_factory.mktemp("data") / "letters"
    return write_data(folder, letters(16 * 26 + 9), letters(200), {"kind": "byte"}, 257)


@pytest.fixture
def run(data, tmp_path, capsys):
    """Return a function that trains in tmp_path/out and returns what was printed, having checked the exit status."""

    def run(*words, out="out", status=0, **settings):
        settings = TINY | {"dataset": data, "out_dir": tmp_path / out} | settings
        capsys.readouterr()
        found = train.main([*map(str, words), *(f"--{name}={value}" for name, value in settings.items())])
        printed = capsys.readouterr()
        assert found == status, printed.out + printed.err
        if status == 2:
            assert len(printed.err.splitlines()) == 1 and printed.err.startswith("error: ")
            return printed.err
        assert printed.err == ""
        return printed.out

    return run


def read_metrics(out_dir):
    """Return the step lines and the evaluation lines of a run, each in their order."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    return [r for r in records if "loss" in r], [r for r in records if "val_loss" in r]


def assert_same_run(a, b):
    """Check that two runs ended with the same bits: weights, moments and each figure of each step."""
    first, second = checkpoint.load(a), checkpoint.load(b)
    assert first["state"]["step"] == second["state"]["step"]
    assert first["state"]["best_val_loss"] == second["state"]["best_val_loss"]
    for part in ("weights", "optimizer"):
        assert first[part].keys() == second[part].keys()
        for name, tensor in first[part].items():
            assert torch.equal(tensor, second[part][name]), name
    for some, others in zip(read_metrics(a), read_metrics(b), strict=True):
        keep = ("step", "loss", "lr", "grad_norm", "val_loss", "val_bpb")
        assert [{k: r[k] for k in keep if k in r} for r in some] == [{k: r[k] for k in keep if k in r} for r in others]


# --- resuming


RESUMED = {"dropout": 0.2, "grad_clip": 0.1, "gradient_accumulation_steps": 2, "batch_size": 2}


def test_20_steps_equal_10_and_10_more(run, tmp_path):
    settings = RESUMED | {"eval_interval": 10}
    printed = run(out="straight", max_iters=20, **settings)
    assert "400 tokens an epoch, 3.20 epochs in all" in printed  # so an epoch ends in each half
    run(out="halves", max_iters=10, **settings)
    run("--init_from=resume", out="halves", max_iters=20, **settings)
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    steps, evaluations = read_metrics(tmp_path / "halves")
    assert [r["step"] for r in steps] == list(range(20))
    assert [r["step"] for r in evaluations] == [10, 20]
    assert all(r["grad_norm"] > settings["grad_clip"] for r in steps)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(run, data, tmp_path, number):
    settings = TINY | RESUMED | {"dataset": data, "out_dir": tmp_path / "stopped", "max_iters": 10**6}
    command = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=config_module.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(number)
                break
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == ""
    found = re.fullmatch(
        r"stopped at step (\d+); python train.py ... --init_from=resume goes on from there", printed.splitlines()[-1]
    )
    stopped = int(found[1])
    assert checkpoint.load(tmp_path / "stopped")["state"]["step"] == stopped >= 3

    last = stopped + 3
    run("--init_from=resume", out="stopped", **RESUMED | {"max_iters": last})
    run(out="straight", **RESUMED | {"max_iters": last})
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")
    assert [r["step"] for r in read_metrics(tmp_path / "stopped")[0]] == list(range(last))


def test_a_signal_before_the_first_step_promises_no_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "flops_of_a_meta_copy", lambda config: os.kill(os.getpid(), signal.SIGINT))
    assert run(status=130).splitlines()[-1] == "stopped at step 0; nothing to save yet"
    assert not checkpoint.exists(tmp_path / "out")


def test_a_signal_during_an_evaluation_saves_too(run, tmp_path, monkeypatch):
    def evaluate(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return 1e9 if checkpoint.exists(tmp_path / "out") else 1.0  # the first one is the best there will be

    monkeypatch.setattr(train, "evaluate", evaluate)
    run(status=130, eval_interval=2, max_iters=10, always_save_checkpoint=False)
    assert checkpoint.load(tmp_path / "out")["state"]["step"] == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers of before are back


def test_what_changed_is_said_on_resume(run, tmp_path):
    run(max_iters=2)
    printed = run("--init_from=resume", max_iters=4, learning_rate=5e-4, warmup_iters=1)
    assert "changed since the checkpoint: max_iters was 2, is 4 from here on" in printed
    assert "changed since the checkpoint: learning_rate was 0.001, is 0.0005 from here on" in printed
    assert printed.count("changed since") == 3
    lrs = [r["lr"] for r in read_metrics(tmp_path / "out")[0]]
    assert lrs[1] > 6e-4 and lrs[2] <= 5e-4


def test_resume_refuses_another_architecture_and_a_finished_run(run, tmp_path):
    run(max_iters=2)
    before = sorted(tmp_path.rglob("*"))
    error = run("--init_from=resume", status=2, n_layer=3, n_embd=64)
    assert "the checkpoint was trained with n_layer=2, n_embd=32" in error and "to resume, set the same" in error
    for last in (2, 1):
        error = run("--init_from=resume", status=2, max_iters=last)
        assert f"the run is at step 2 of max_iters={last}; to go on, raise --max_iters" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_resume_without_a_checkpoint(run, tmp_path):
    assert f"{tmp_path / 'out'}: no checkpoint there; train first" in run("--init_from=resume", status=2)
    assert not (tmp_path / "out").exists()


def test_a_cut_off_last_line_of_the_log_is_dropped(run, tmp_path):
    run(max_iters=3)
    with (tmp_path / "out" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 5.1}\n{"step": 4, "lo')
    run("--init_from=resume", max_iters=5)
    steps, _ = read_metrics(tmp_path / "out")
    assert [r["step"] for r in steps] == list(range(5)) and all(r.keys() == STEP_KEYS for r in steps)


def test_a_second_run_names_both_ways_on(run, tmp_path):
    run(max_iters=4, eval_interval=2)
    out_dir = tmp_path / "out"
    mine = {"notes.txt": "keep", "step_notes.md": "keep", "step_plans/plan.txt": "keep"}
    for name, text in mine.items():
        (out_dir / name).parent.mkdir(exist_ok=True)
        (out_dir / name).write_text(text, encoding="utf-8")
    before = {p: p.stat().st_mtime_ns for p in out_dir.rglob("*")}
    error = run(status=2)
    assert f"{out_dir} holds an earlier run: --init_from=resume continues it, --overwrite discards it" in error
    assert "choose one" in run("--overwrite", "--init_from=resume", status=2, max_iters=6)
    assert {p: p.stat().st_mtime_ns for p in out_dir.rglob("*")} == before

    run("--overwrite", max_iters=3)
    assert sorted(p.name for p in out_dir.glob("step_0*")) == ["step_00000003"]
    assert [r["step"] for r in read_metrics(out_dir)[0]] == [0, 1, 2]
    assert {name: (out_dir / name).read_text(encoding="utf-8") for name in mine} == mine


# --- learning


def test_one_batch_is_learned_by_heart(run, tmp_path):
    ids = letters(17)  # one window, the only one there is
    folder = write_data(tmp_path / "window", ids, ids, {"kind": "byte"}, 257)
    run(dataset=folder, max_iters=60, learning_rate=1e-2, lr_decay_iters=60, tie_weights=False)
    losses = [r["loss"] for r in read_metrics(tmp_path / "out")[0]]
    assert losses[0] == pytest.approx(math.log(257))  # of an untied head, which starts at zero
    assert losses[-1] < 0.05 * math.log(257)


@pytest.mark.parametrize(
    ("vocab_size", "tie_weights", "init", "tolerance"), [(65, True, "xavier", 0.02), (5000, False, "gpt2", 0.03)]
)
def test_the_first_loss_is_that_of_a_guess(run, tmp_path, vocab_size, tie_weights, init, tolerance):
    chars = "".join(map(chr, range(48, 48 + 65)))
    folder = write_data(tmp_path / "chars", letters(900) % 65, letters(90) % 65, {"kind": "char", "chars": chars}, 65)
    run(dataset=folder, max_iters=1, vocab_size=vocab_size, tie_weights=tie_weights, init=init)
    assert read_metrics(tmp_path / "out")[0][0]["loss"] == pytest.approx(math.log(vocab_size), rel=tolerance)


def test_accumulation_changes_neither_the_gradients_nor_the_figures(run, tmp_path):
    run(out="whole", max_iters=6, batch_size=8)
    run(out="parts", max_iters=6, batch_size=2, gradient_accumulation_steps=4)
    weights = [checkpoint.load(tmp_path / out)["weights"] for out in ("whole", "parts")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-5, atol=1e-5)
    runs = [read_metrics(tmp_path / out)[0] for out in ("whole", "parts")]
    for one, other in zip(*runs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    flops = [
        json.loads((tmp_path / out / "ledger.json").read_text())["measured"]["flops_per_step"]
        for out in ("whole", "parts")
    ]
    assert flops[0] == flops[1]
    for record in itertools.chain(runs[0][1:], runs[1][1:]):
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(8 * 16)
        assert record["mfu"] * record["step_s"] * PEAK == pytest.approx(flops[0])


@pytest.mark.parametrize("grad_clip", [0.1, None])
def test_gradients_are_clipped_to_the_norm_that_is_set(run, tmp_path, grad_clip):
    run(max_iters=1, grad_clip=grad_clip, beta1=0.9)
    moments = checkpoint.load(tmp_path / "out")["optimizer"]
    first = torch.stack([m.norm() for name, m in moments.items() if name.startswith("exp_avg.")]).norm()
    norm = read_metrics(tmp_path / "out")[0][0]["grad_norm"]  # before clipping
    assert norm > 0.2 and first == pytest.approx((1 - 0.9) * (grad_clip or norm), rel=1e-4)


# --- the log


@pytest.mark.parametrize("log_interval", [1, 3])
def test_metrics_have_the_documented_keys_and_a_line_per_step(run, tmp_path, log_interval):
    printed = run(max_iters=8, log_interval=log_interval, eval_interval=4)
    steps, evaluations = read_metrics(tmp_path / "out")
    assert [r["step"] for r in steps] == list(range(8))
    assert all(r.keys() == STEP_KEYS for r in steps)
    assert [r["step_s"] is None for r in steps] == [True] + [False] * 7  # the first step is a profiled warm-up
    assert [r["mfu"] is None for r in steps] == [r["tokens_per_s"] is None for r in steps] == [True] + [False] * 7
    assert all(r["peak_source"] == "a test" and r["memory_bytes"] > 2**20 and r["data_wait_s"] >= 0 for r in steps)
    assert [r["step"] for r in evaluations] == [4, 8]
    for record in evaluations:
        assert record.keys() == {"step", "val_loss", "val_bpb"}
        assert record["val_bpb"] == pytest.approx(record["val_loss"] / math.log(2) / 2)  # two bytes a token
    shown = re.findall(r"^step (\d)/8 \| loss", printed, re.M)
    # each step, or each third and what evaluations and the ledger ask for
    assert shown == (list("12345678") if log_interval == 1 else list("123468"))
    assert "step 1/8" in printed and "warming up" in printed.split("step 2/8")[0]


def test_a_terminal_sees_one_live_line(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printed = run(max_iters=3)
    assert printed.count("\r\x1b[Kstep 2/3 | loss") == 1 and "\nstep 2/3" not in printed
    assert "\r\x1b[Kstep 3 | validation loss" in printed  # in place of the live line


@pytest.mark.parametrize("log_interval", [1, 3])
def test_evaluating_and_saving_are_not_in_the_step_time(run, tmp_path, monkeypatch, log_interval):
    save = checkpoint.save

    def slow(result):
        time.sleep(0.2)
        return result

    monkeypatch.setattr(train, "evaluate", lambda *args: slow(1.0))
    monkeypatch.setattr(checkpoint, "save", lambda *args: slow(save(*args)))
    run(max_iters=6, eval_interval=1, log_interval=log_interval)
    times = [r["step_s"] for r in read_metrics(tmp_path / "out")[0]]
    assert len(times) == 6 and times[0] is None and all(0 < t < 0.2 for t in times[1:])


def test_waiting_for_data_is_measured_and_in_the_step_time(run, tmp_path, monkeypatch):
    following = train.Loader.next

    def slow(self):
        time.sleep(0.1)
        return following(self)

    monkeypatch.setattr(train.Loader, "next", slow)
    run(max_iters=6, gradient_accumulation_steps=2, log_interval=10)  # so that the last four steps share a clock
    for record in read_metrics(tmp_path / "out")[0][1:]:
        assert record["data_wait_s"] >= 0.2 and 0.2 <= record["step_s"] < 0.4


def test_wandb_gets_the_same_lines(run, tmp_path, monkeypatch):
    logged, finished = [], []
    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init = lambda project, name: types.SimpleNamespace(
        log=lambda record, step: logged.append(record), finish=lambda: finished.append((project, name))
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(wandb_log=True, wandb_project="p", wandb_run_name="r")
    steps, evaluations = read_metrics(tmp_path / "out")
    assert logged == steps + evaluations and finished == [("p", "r")]


# --- gradients that are not finite


def spoil(monkeypatch, bad_steps, value):
    """Make the gradients of some steps hold a value; return a list that fills with what each step changed."""
    build, changed = trainer.build, []

    def build_spoiled(config):
        model, backwards = build(config), itertools.count()

        def hook(grad):
            if grad.is_meta or next(backwards) not in bad_steps:
                return grad
            grad = grad.clone()
            grad[-1, -1] = value
            return grad

        model.blocks[0].mlp.up.weight.register_hook(hook)
        return model

    class Watched(trainer.AdamW):
        def step(self, *args, **kwargs):
            tensors = [*self.parameters, *self.exp_avg, *self.exp_avg_sq, self.step_count]
            before = [t.detach().clone() for t in tensors]
            super().step(*args, **kwargs)
            changed.append([not torch.equal(old, new) for old, new in zip(before, tensors, strict=True)])

    monkeypatch.setattr(trainer, "build", build_spoiled)
    monkeypatch.setattr(trainer, "AdamW", Watched)
    return changed


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_step_without_finite_gradients_changes_nothing(run, tmp_path, monkeypatch, value):
    changed = spoil(monkeypatch, {2}, value)
    printed = run(max_iters=5, grad_clip=0)  # without clipping, nothing but the check stands in between
    assert [any(step) for step in changed] == [True, True, False, True, True]
    steps, _ = read_metrics(tmp_path / "out")
    assert [r["grad_norm"] is None for r in steps] == [False, False, True, False, False]
    assert all(math.isfinite(r["loss"]) for r in steps)
    assert printed.count("not finite") == 1 and "step 3: its gradients are not finite, so it changed nothing" in printed
    assert checkpoint.load(tmp_path / "out")["optimizer"]["step_count"] == 4


def test_float16_halves_its_loss_scale_at_an_overflow(run, tmp_path, monkeypatch):
    changed = spoil(monkeypatch, {1}, math.inf)
    printed = run(max_iters=3, dtype="float16")
    assert "note        float16: the loss is scaled" in printed
    skipped = [not any(step) for step in changed]
    assert skipped[1] and not all(skipped)
    assert checkpoint.load(tmp_path / "out")["optimizer"]["loss_scale"] == 2.0 ** (16 - sum(skipped))
    assert [r["grad_norm"] is None for r in read_metrics(tmp_path / "out")[0]] == skipped


# --- torch.compile


def fails_at_once(model):
    raise RuntimeError("no compiler here\nand a long story")


def fails_at_the_first_forward(model):
    def forward(*args, **settings):
        raise RuntimeError("no compiler here\nand a long story")

    return forward


@pytest.mark.parametrize("broken", [fails_at_once, fails_at_the_first_forward])
def test_a_compiler_that_fails_leaves_the_run_eager(run, tmp_path, monkeypatch, broken):
    monkeypatch.setattr(torch, "compile", broken)
    printed = run(out="fallen_back", compile=True, dropout=0.1)
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    assert warnings == ["warning     torch.compile failed, so the model is eager: no compiler here"]
    run(out="eager", compile=False, dropout=0.1)
    assert_same_run(tmp_path / "fallen_back", tmp_path / "eager")


class Compiled:
    """As torch.compile returns a module: with a length that it refuses to tell, so it is neither true nor false."""

    def __init__(self, model):
        self.model = model

    def __call__(self, *arguments, **settings):
        return self.model(*arguments, **settings)

    def __len__(self):
        raise TypeError("Transformer does not support len()")


def test_a_compiled_run_warms_up_longer_and_bounds_its_memory(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", Compiled)
    printed = run(max_iters=4, compile=True)
    assert re.search(r"^compiled    the model, in \d+\.\d s$", printed, re.M)
    assert [r["step_s"] is None for r in read_metrics(tmp_path / "out")[0]] == [True, True, False, False]
    assert "ledger after step 3 (compiled: the predicted memory and time are an eager step's, upper bounds)" in printed


def test_the_cpu_compiles_only_when_asked(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: pytest.fail("compiled unasked"))
    run(max_iters=1)


@pytest.mark.parametrize("fails", [False, True])
def test_the_optimizer_is_compiled_before_the_run_is_predicted_or_the_run_is_eager(run, tmp_path, monkeypatch, fails):
    kernel = None if fails else (lambda *arguments: optimizer.update(*arguments))
    monkeypatch.setattr(train, "compiled_update", lambda device: (kernel, "no compiler here" if fails else None))
    monkeypatch.setattr(optimizer, "compiled_update", lambda device: (kernel, None))
    printed = run(out="asked", compile_optimizer=True)
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    assert warnings == ["warning     torch.compile failed, so AdamW is eager: no compiler here"] * fails
    assert bool(re.search(r"^compiled    AdamW, into one pass over memory, in \d+\.\d s$", printed, re.M)) is not fails
    assert f"AdamW: {'no (it would save' if fails else 'yes ('}" in printed
    assert read_file(tmp_path / "asked" / "config.py")["compile_optimizer"] is not fails
    run(out="eager")
    assert_same_run(tmp_path / "asked", tmp_path / "eager")


@pytest.mark.parametrize(
    "settings, parameters, words",
    [
        ({"device": "cpu", "max_iters": 1000}, 10**7,
         "the model: no (on a CPU it gained 8% at most, and lost with large models); "
         "AdamW: no (it would save 10 s, and take up to 10 s)"),
        ({"device": "cpu", "compile_optimizer": True}, 10**8,
         "the model: no (on a CPU it gained 8% at most, and lost with large models); AdamW: yes (0.1 s less a step)"),
        ({"device": "cuda", "compile": True, "compile_optimizer": True}, 10**8, "the model: yes; AdamW: yes"),
        ({"device": "mps", "compile": False, "compile_optimizer": False}, 10**8, "the model: no; AdamW: no"),
    ],
)  # fmt: skip
def test_what_is_compiled_is_said_with_the_reason(settings, parameters, words):
    config = Config(**{"compile": False, "compile_optimizer": False, **settings})
    assert train.what_is_compiled(config, parameters) == words


# --- the preflight


def test_what_cannot_fit_is_refused_before_a_model_is_built(run, tmp_path, monkeypatch):
    build = trainer.build
    monkeypatch.setattr(trainer, "build", lambda config: pytest.fail("a model was built"))
    error = run("--memory=2MiB", status=2, batch_size=512)
    advice = (
        r"--batch_size=(\d+) is the largest that fits; --batch_size=(\d+) --gradient_accumulation_steps=(\d+) takes"
    )
    largest, size, micro_steps = map(int, re.search(advice, error).groups())
    assert 1 < size <= largest < 512 and size * micro_steps == 512  # as many sequences a step
    error = run("--memory=2MiB", status=2, batch_size=largest + 1)
    assert f"--batch_size={largest} is the largest that fits" in error
    assert "batch size cannot help: parameters, gradients" in run("--memory=0.1MiB", status=2)
    assert "not even --batch_size=1 fits; a shorter --block_size" in run("--memory=0.52MiB", status=2)
    assert not (tmp_path / "out").exists()

    monkeypatch.setattr(trainer, "build", build)
    run("--memory=2MiB", batch_size=largest, max_iters=1)
    run("--memory=2MiB", "--overwrite", batch_size=size, gradient_accumulation_steps=micro_steps, max_iters=1)


@pytest.mark.parametrize("memory", ["12", "12gib", "-1GiB", "nanGiB", "GiB"])
def test_memory_wants_a_unit(run, tmp_path, memory):
    error = run(f"--memory={memory}", status=2)
    assert error == f"error: --memory={memory}: expects a size with its unit, such as 39.5GiB or 40GB\n"
    assert not (tmp_path / "out").exists()


def test_the_preflight_tells_what_a_newcomer_would_ask(run, tmp_path, data):
    printed = run(max_iters=2, warmup_iters=5)
    assert f"data        {data}: 400 tokens an epoch, 0.32 epochs in all" in printed
    assert (
        f"checkpoint  in {tmp_path / 'out'}: first after step 2, then at evaluations and at the end, and at Ctrl-C"
        in printed
    )
    assert "note        warmup_iters=5 is no shorter than the run: lr never reaches its peak" in printed
    assert printed.index("peak") < printed.index("step 1/2")
    assert "note" not in run("--init_from=resume", max_iters=6, warmup_iters=2)


def test_the_preflight_notes_what_slows_this_machine(run, monkeypatch):
    monkeypatch.setattr(train, "what_slows_cpus", lambda: ["4 threads on 2 cores"])
    assert "\nnote        4 threads on 2 cores\n" in run(max_iters=1)


# --- the ledger


def test_the_ledger_holds_the_prediction_against_the_run(run, tmp_path):
    printed = run("--mfu=1e-7", max_iters=3, n_layer=3, n_embd=96, n_head=4, block_size=64, batch_size=8)
    assert printed.count("ledger after step 2") == printed.count("ledger at the end") == 1
    assert printed.index("step 2/3") < printed.index("ledger after step 2") < printed.index("step 3/3")
    content = json.loads((tmp_path / "out" / "ledger.json").read_text(encoding="utf-8"))
    assert (
        content.keys() == {"when", "note", "rows", "device", "prediction", "measured"}
        and content["when"] == "at the end"
    )
    rows = {row["figure"]: row for row in content["rows"]}
    assert list(rows) == ["peak memory", "FLOPs per step", "step time", "tokens/s", "MFU", "checkpoint"]
    assert rows["peak memory"]["ratio"] == pytest.approx(1, abs=0.01) and rows["peak memory"]["within"]
    assert rows["peak memory"]["measured"] > 10 * 2**20
    curve = content["measured"]["timeline"]
    assert max(n_bytes for _, n_bytes in curve) == rows["peak memory"]["measured"] and 20 < len(curve) <= 100
    assert all(0 <= a < b < 1 for (a, _), (b, _) in itertools.pairwise(curve))
    assert content["measured"]["resident_bytes"] > rows["peak memory"]["measured"]
    assert rows["FLOPs per step"]["ratio"] == 1 and rows["FLOPs per step"]["measured"] > 0
    assert rows["step time"]["measured"] == content["measured"]["step_s"]
    flops = content["prediction"]["flops"]["per_step"]
    assert rows["MFU"]["measured"] == pytest.approx(flops / (content["measured"]["step_s"] * PEAK))
    assert not rows["step time"]["within"]  # nothing is as slow as this --mfu has it
    marked = [line for line in printed.split("ledger at the end")[1].splitlines() if "outside 1" in line]
    assert [line.split()[0] for line in marked] == ["step", "tokens/s", "MFU"] and all(
        "--mfu" in line for line in marked
    )


def test_a_row_outside_its_band_is_marked():
    prediction = {
        "memory": {"peak": 10**9, "checkpoint": 2 * 10**9},
        "flops": {"per_step": 400, "hardware_per_step": 400, "tokens_per_step": 100},
        "time": {"step_s": 1.0, "tokens_per_s": 100.0, "mfu": 0.4, "peak_flops": 1000.0,
                 "basis": "assumed", "band": 0.5},
    }  # fmt: skip

    def verdicts(compiled=False, **measured):
        measured = {"peak_bytes": None, "flops_per_step": None, "step_s": None, "checkpoint_bytes": None} | measured
        rows = ledger.compare(prediction, measured, compiled)
        lines = list(ledger.table(rows, "now", ""))[2:]
        assert [row["within"] for row in rows] == ["outside" not in line for line in lines]
        return [row["within"] for row in rows]

    million = 10**6
    assert verdicts(peak_bytes=1049 * million) == verdicts(peak_bytes=951 * million) == [True]
    assert verdicts(peak_bytes=1051 * million) == verdicts(peak_bytes=949 * million) == [False]
    assert verdicts(compiled=True, peak_bytes=300) == [True]
    assert verdicts(compiled=True, peak_bytes=1051 * million) == [False]
    assert verdicts(flops_per_step=400) == [True] and verdicts(flops_per_step=401) == [False]
    assert verdicts(step_s=1.4) == [True, True, True] and verdicts(step_s=1.6) == [False, True, True]
    assert verdicts(compiled=True, step_s=0.3) == [True] * 3 and verdicts(compiled=True, step_s=1.6)[0] is False
    prediction["time"] |= {"basis": "timed", "band": 0.15}
    assert (
        verdicts(step_s=1.14) == [True] * 3 and verdicts(step_s=1.16)[0] is False and verdicts(step_s=0.84)[0] is False
    )
    assert verdicts(checkpoint_bytes=2099 * million) == [True]
    assert verdicts(checkpoint_bytes=2101 * million) == [False]
    prediction["memory"]["peak"] = 10**5  # a model so small that a few KB of headers or scratch outweigh the band
    assert verdicts(peak_bytes=10**5 + 2**16 - 1) == [True] and verdicts(peak_bytes=10**5 + 2**16) == [False]
    assert verdicts() == []


# --- measuring


def test_a_peak_that_no_table_knows_is_measured(monkeypatch):
    flops, n = measure.matmul_ceiling(torch.device("cpu"), "float32", budget_s=0.01)
    assert flops > 1e6 and n in (256, 512, 1024, 2048)

    def write_local(device):
        raise OSError("read-only")

    monkeypatch.setattr(measure, "matmul_ceiling", lambda device, dtype: (5e9, 256))
    monkeypatch.setattr(hardware, "write_local", write_local)
    unknown = Device("some processor", "cpu", peak_flops={"bfloat16": 1e9})
    found = measure.with_ceiling(unknown, torch.device("cpu"), "float32")
    assert found.peak_flops == {"bfloat16": 1e9, "float32": 5e9}
    assert found.source == "measured here: matmul of 256 cubed"
    assert measure.with_ceiling(found, torch.device("cpu"), "float32") is found


# --- what a run writes and shows besides


def test_the_settings_of_a_run_are_kept_resolved(run, tmp_path):
    run(max_iters=1)
    kept, _ = config_module.load([str(tmp_path / "out" / "config.py")])
    assert dataclasses.asdict(kept) == checkpoint.load(tmp_path / "out")["state"]["config"]
    assert kept.d_ff == 128 and kept.vocab_size == 257 and kept.compile is False


def test_only_evaluating_leaves_no_trace(run, tmp_path):
    printed = run(eval_only=True, eval_iters=None)
    assert re.search(r"^validation loss 5\.\d{4}, \d\.\d{4} bits per byte \(the whole split\)$", printed, re.M)
    assert "(a fixed sample of 2 batches)" in run(eval_only=True)
    assert "checkpoint" not in printed and not (tmp_path / "out").exists()
    run(max_iters=2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    best = checkpoint.load(tmp_path / "out")["state"]["best_val_loss"]
    printed = run("--init_from=resume", eval_only=True, max_iters=2)
    assert f"validation loss {best:.4f}" in printed
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_run_ends_with_a_sample(run, monkeypatch):
    printed = run(max_iters=1, sample_tokens=12)
    heading, text = printed.split("--- a sample ")[1].split("\n", 1)
    assert heading.startswith("(12 tokens, temperature 0.8; python sample.py ") and text.strip()

    def unknown(definition):
        raise ConfigError("the vocabulary of gpt2 cannot be read")

    monkeypatch.setattr(train, "Tokenizer", unknown)
    assert "no sample: the vocabulary of gpt2 cannot be read" in run("--overwrite", max_iters=1, sample_tokens=12)


def test_checkpoints_only_of_what_improved(run, tmp_path, monkeypatch):
    out_dir = tmp_path / "out"
    losses = iter([3.0, 4.0, 2.0, 2.5, 5.0, 1.0])
    monkeypatch.setattr(train, "evaluate", lambda *args: next(losses))
    printed = run(max_iters=3, eval_interval=1, always_save_checkpoint=False)
    assert f"checkpoint  in {out_dir}: first after step 1, then where validation improved, and at Ctrl-C" in printed
    assert sorted(p.name for p in out_dir.glob("step_*")) == ["step_00000001", "step_00000003"]
    printed = run("--init_from=resume", max_iters=6, eval_interval=1, always_save_checkpoint=False)
    assert re.findall(r"^saved (.*)$", printed, re.M) == [str(out_dir / "step_00000006")]
    assert checkpoint.load(out_dir)["state"]["best_val_loss"] == 1.0
    assert (out_dir / "best").read_text(encoding="utf-8").strip() == "step_00000006"


def test_nothing_but_our_own_lines_without_a_deprecated_call(data, tmp_path):
    settings = TINY | {"dataset": data, "out_dir": tmp_path / "out", "max_iters": 1, "dtype": "bfloat16"}
    flags = ["-W", "error::FutureWarning", "-W", "error::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *flags, "train.py", *(f"--{name}={value}" for name, value in settings.items())],
        cwd=config_module.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("device ") and "ledger at the end" in done.stdout


# --- the quick start


QUICK = {k: TINY[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "device", "dtype")}


def test_the_quick_start_prepares_its_corpus_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config_module, "ROOT", tmp_path)
    calls = []

    def prepare(command, check):
        calls.append([str(word) for word in command])
        write_data(tmp_path / "data" / "stdlib", letters(600), letters(200), {"kind": "byte"}, 257)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(train.subprocess, "run", prepare)
    file = Path(train.__file__).parent / "configs" / "quickstart.py"
    settings = QUICK | {"max_iters": 3, "sample_tokens": 8, "out_dir": tmp_path / "out"}
    argv = [str(file), *(f"--{name}={value}" for name, value in settings.items())]
    assert train.main(argv) == 0
    printed = capsys.readouterr().out
    assert calls == [[sys.executable, str(train.ROOT / "data" / "prepare.py"), "stdlib"]]
    for part in ("data/stdlib is not prepared yet", "step 3/3", "bits per byte (the whole split)", "saved", "a sample"):
        assert part in printed
    assert train.main([*argv, "--overwrite"]) == 0 and len(calls) == 1  # prepared once


def test_a_corpus_that_could_not_be_prepared(run, tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "ROOT", tmp_path)
    monkeypatch.setattr(train.subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess([], 2))
    assert "data/prepare.py stdlib failed; its message stands above" in run(dataset="stdlib", status=2)
    assert list(tmp_path.iterdir()) == []


# --- a user's mistakes


def test_without_arguments_and_data_the_quick_start_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config_module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert train.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "openwebtext: no prepared data there" in line
    assert "python data/prepare.py openwebtext" in line and "python train.py configs/quickstart.py" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "settings", "messages"),
    [
        ([], {"dataset": "no/such"}, ["no/such: no prepared data there", "python data/prepare.py no/such"]),
        ([], {"dataset": "no/such", "vocab_size": 9}, ["no/such: no prepared data there"]),
        ([], {"device": "cuda"}, ["device='cuda': this torch sees no CUDA device; --device=cpu runs without one"]),
        ([], {"device": "mps"}, ["device='mps': not available here; --device=cpu"]),
        ([], {"device": "nonsense"}, ["device='nonsense': not a device; use auto, cpu, cuda, cuda:1 or mps"]),
        ([], {"device": "meta"}, ["device='meta': napkin runs on cpu, cuda and mps"]),
        ([], {"init_from": "gpt2"}, ["init_from='gpt2'", "reads no published weights"]),
        ([], {"vocab_size": 50}, ["vocab_size=50; --vocab_size=123 has it"]),
        ([], {"block_size": 4096}, ["block_size + 1 = 4097", "--block_size=424 at most"]),
        ([], {"n_embd": 33}, ["n_embd=33 does not divide by n_head=2"]),
        (["--n_layers=2"], {}, ["unknown setting --n_layers; did you mean n_layer?"]),
        (["--mfu=0"], {}, ["--mfu=0.0 must lie in (0, 1]"]),
        (["--mfu=1.5"], {}, ["--mfu=1.5 must lie in (0, 1]"]),
        (["no_such.py"], {}, ["no_such.py: no such config file; configs/ holds examples"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(run, tmp_path, monkeypatch, words, settings, messages):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    error = run(*words, status=2, **settings)
    assert all(message in error for message in messages), error
    assert not (tmp_path / "out").exists()


def test_a_card_that_is_not_there(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "device='cuda:2': this machine has cuda:0 to cuda:1" in run(device="cuda:2", status=2)


def test_several_processes_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "this version trains in one process; start it without torchrun" in run(status=2)
    assert not (tmp_path / "out").exists()


def test_missing_wandb_is_noticed_before_anything_is_discarded(run, tmp_path, monkeypatch):
    run(max_iters=2)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it now fails
    error = run("--overwrite", wandb_log=True, status=2)
    assert error == "error: wandb_log=True needs the wandb package; --wandb_log=False logs without it\n"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = run(out="file/out", status=2)
    assert f"{tmp_path / 'file' / 'out'}: cannot be written (Not a directory); --out_dir names another folder" in error


def test_data_of_another_tokenizer_stops_the_run_where_it_is_met(run, tmp_path):
    folder = tmp_path / "nanogpt"  # without a meta.json, nothing is known of its ids beforehand
    write_data(folder, letters(900), letters(200), {}, 0)
    (folder / "meta.json").unlink()
    error = run(dataset=folder, vocab_size=100, status=2)
    assert re.search(r"train\.bin: id \d+ at token \d+ is beyond vocab_size=100; the data was made with another", error)
    assert not checkpoint.exists(tmp_path / "out")


def test_running_out_of_memory_is_one_line_with_the_prediction(run, monkeypatch):
    def allocate(*arguments, **settings):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(trainer, "AdamW", allocate)
    error = run(status=2, max_iters=1)
    assert "were predicted at the peak" in error and "tried to allocate 2 GiB" in error


def test_a_validation_loss_that_is_not_a_number_is_never_the_best(run, tmp_path, monkeypatch):
    losses = iter([math.nan, 3.0, 2.0])
    monkeypatch.setattr(train, "evaluate", lambda *arguments: next(losses))
    run(max_iters=6, eval_interval=2, always_save_checkpoint=False)
    assert (tmp_path / "out" / "best").read_text(encoding="utf-8").strip() == "step_00000006"


@pytest.mark.parametrize("seed", [2**63, 10**20])
def test_a_seed_too_large_for_the_generator_is_refused(run, seed):
    assert f"seed={seed} must be below 2**63" in run(status=2, seed=seed)


def test_a_resumed_run_does_not_hold_its_checkpoint(run, monkeypatch):
    run(max_iters=2)
    load, watched = checkpoint.load, []

    def watching(path):
        saved = load(path)
        watched.extend(weakref.ref(t) for part in ("weights", "optimizer") for t in saved[part].values())
        return saved

    monkeypatch.setattr(checkpoint, "load", watching)
    monkeypatch.setattr(train, "evaluate", lambda *arguments: float(sum(r() is not None for r in watched)))
    printed = run("--init_from=resume", max_iters=4)
    assert len(watched) > 10 and "validation loss 0.0000" in printed  # none of them is alive after a step
