"""The command: it learns, evaluates, stops when asked, and answers a mistake in one line."""

import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import config
import train
import trainer
from cli.errors import ConfigError
from config import ROOT
from run import checkpoint
from tests.training import RESUMED, TINY, assert_same_run, files_and_times, letters, read_metrics, write_data

pytestmark = pytest.mark.usefixtures("known_peak")


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


# --- evaluating, and saving what improved


def test_only_evaluating_leaves_no_trace(run, tmp_path):
    printed = run(eval_only=True, eval_iters=None)
    assert re.search(r"^validation loss 5\.\d{4}, \d\.\d{4} bits per byte \(the whole split\)$", printed, re.M)
    assert "(a fixed sample of 2 batches)" in run(eval_only=True)
    assert "checkpoint" not in printed and not (tmp_path / "out").exists()
    run(max_iters=2)
    before = files_and_times(tmp_path)
    best = checkpoint.load(tmp_path / "out")["state"]["best_val_loss"]
    printed = run("--init_from=resume", eval_only=True, max_iters=2)
    assert f"validation loss {best:.4f}" in printed
    assert files_and_times(tmp_path) == before


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


def test_a_validation_loss_that_is_not_a_number_is_never_the_best(run, tmp_path, monkeypatch):
    losses = iter([math.nan, 3.0, 2.0])
    monkeypatch.setattr(train, "evaluate", lambda *arguments: next(losses))
    run(max_iters=6, eval_interval=2, always_save_checkpoint=False)
    assert (tmp_path / "out" / "best").read_text(encoding="utf-8").strip() == "step_00000006"


def test_a_run_ends_with_a_sample(run, monkeypatch):
    printed = run(max_iters=1, sample_tokens=12)
    heading, text = printed.split("--- a sample ")[1].split("\n", 1)
    assert heading.startswith("(12 tokens, temperature 0.8; python sample.py ") and text.strip()

    def unknown(definition):
        raise ConfigError("the vocabulary of gpt2 cannot be read")

    monkeypatch.setattr("run.text.Tokenizer", unknown)
    assert "no sample: the vocabulary of gpt2 cannot be read" in run("--overwrite", max_iters=1, sample_tokens=12)


# --- stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_from_there(run, data, tmp_path, number):
    settings = TINY | RESUMED | {"dataset": data, "out_dir": tmp_path / "stopped", "max_iters": 10**6}
    command = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(number)
                break
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == ""
    found = re.fullmatch(
        r"stopped at step (\d+); python train.py ... --init_from=resume continues from there", printed.splitlines()[-1]
    )
    stopped = int(found[1])
    assert checkpoint.load(tmp_path / "stopped")["state"]["step"] == stopped >= 3

    last = stopped + 3
    run("--init_from=resume", out="stopped", **RESUMED | {"max_iters": last})
    run(out="straight", **RESUMED | {"max_iters": last})
    assert_same_run(tmp_path / "stopped", tmp_path / "straight")
    assert [r["step"] for r in read_metrics(tmp_path / "stopped")[0]] == list(range(last))


def test_a_signal_before_the_first_step_promises_no_checkpoint(run, tmp_path, monkeypatch):
    class Signalled(train.StopSignals):
        def __init__(self):
            super().__init__()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "StopSignals", Signalled)
    assert run(status=130).splitlines()[-1] == "stopped at step 0; nothing was saved yet"
    assert not checkpoint.exists(tmp_path / "out")


def test_a_signal_during_an_evaluation_saves_too(run, tmp_path, monkeypatch):
    def evaluate(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return 1e9 if checkpoint.exists(tmp_path / "out") else 1.0  # the first one is the best there will be

    monkeypatch.setattr(train, "evaluate", evaluate)
    run(status=130, eval_interval=2, max_iters=10, always_save_checkpoint=False)
    assert checkpoint.load(tmp_path / "out")["state"]["step"] == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers of before are back


# --- the quick start


QUICK = {k: TINY[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "device", "dtype")}


def test_the_quick_start_prepares_its_corpus_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    calls = []

    def prepare(command, check):
        calls.append([str(word) for word in command])
        write_data(tmp_path / "data" / "stdlib", letters(600), letters(200), {"kind": "byte"}, 257)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("run.folder.subprocess.run", prepare)
    file = ROOT / "configs" / "quickstart.py"
    settings = QUICK | {"max_iters": 3, "sample_tokens": 8, "out_dir": tmp_path / "out"}
    argv = [str(file), *(f"--{name}={value}" for name, value in settings.items())]
    assert train.main(argv) == 0
    printed = capsys.readouterr().out
    assert calls == [[sys.executable, str(ROOT / "data" / "prepare.py"), "stdlib"]]
    for part in ("data/stdlib is not prepared yet", "step 3/3", "bits per byte (the whole split)", "saved", "a sample"):
        assert part in printed
    assert train.main([*argv, "--overwrite"]) == 0 and len(calls) == 1  # prepared once


def test_without_arguments_and_data_the_quick_start_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert train.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "openwebtext: no prepared data there" in line
    assert "python data/prepare.py openwebtext" in line and "python train.py configs/quickstart.py" in line
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_our_own_lines_without_a_deprecated_call(data, tmp_path):
    settings = TINY | {"dataset": data, "out_dir": tmp_path / "out", "max_iters": 1, "dtype": "bfloat16"}
    flags = ["-W", "error::FutureWarning", "-W", "error::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *flags, "train.py", *(f"--{name}={value}" for name, value in settings.items())],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fits ") and "predicted and measured at the end" in done.stdout


# --- a user's mistakes


@pytest.mark.parametrize(
    ("words", "settings", "messages"),
    [
        ([], {"dataset": "no/such"}, ["no/such: no prepared data there", "python data/prepare.py no/such"]),
        ([], {"dataset": "no/such", "vocab_size": 9}, ["no/such: no prepared data there"]),
        ([], {"device": "cuda"}, ["device='cuda': this torch sees no CUDA device; --device=cpu runs without one"]),
        ([], {"device": "mps"}, ["device='mps': not available here; --device=cpu"]),
        ([], {"device": "nonsense"}, ["device='nonsense': not a device; use auto, cpu, cuda, cuda:1 or mps"]),
        ([], {"device": "meta"}, ["device='meta': napkin runs on cpu, cuda and mps"]),
        ([], {"init_from": "gpt2"}, ["init_from='gpt2'", "reads no other weights"]),
        ([], {"vocab_size": 50}, ["vocab_size=50; use --vocab_size=123"]),
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


@pytest.mark.parametrize("seed", [2**63, 10**20])
def test_a_seed_too_large_for_the_generator_is_refused(run, seed):
    assert f"seed={seed} must be from 0 to 2^63 - 1" in run(status=2, seed=seed)


def test_running_out_of_memory_is_one_line_with_the_prediction(run, monkeypatch):
    def allocate(*arguments, **settings):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(trainer, "AdamW", allocate)
    error = run(status=2, max_iters=1)
    assert "were predicted at the peak" in error and "tried to allocate 2 GiB" in error
