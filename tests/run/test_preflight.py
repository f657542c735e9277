"""What is printed and decided before a run: its prediction, what is compiled, what is refused, what is noted."""

import re

import pytest
import torch

import optimizer
import trainer
from cli.config_file import read_settings
from config import Config
from hardware.spec import DeviceSpec
from measure import machine
from run import preflight
from tests.training import assert_same_run, read_metrics

# --- what the run will take


def test_the_preflight_tells_what_a_newcomer_would_ask(run, tmp_path, data):
    printed = run(max_iters=2, warmup_iters=5)
    assert f"data        {data}: 400 tokens an epoch, 0.32 epochs in all" in printed
    when = "first after step 2, then at evaluations and at the end, and at Ctrl-C"
    assert f"checkpoint  in {tmp_path / 'out'}: {when}" in printed
    assert "note        warmup_iters=5 is no shorter than the run: lr never reaches its peak" in printed
    assert printed.index("peak") < printed.index("step 1/2")
    assert "note" not in run("--init_from=resume", max_iters=6, warmup_iters=2)


def test_the_preflight_notes_what_slows_this_machine(run, monkeypatch):
    monkeypatch.setattr(preflight, "cpu_warnings", lambda: ["4 threads on 2 cores"])
    assert "\nnote        4 threads on 2 cores\n" in run(max_iters=1)


def test_what_cannot_fit_is_refused_before_a_model_is_built(run, tmp_path, monkeypatch):
    build = trainer.build
    monkeypatch.setattr(trainer, "build", lambda config: pytest.fail("a model was built"))
    error = run("--memory=2MiB", status=3, batch_size=512)
    advice = r"--batch_size=(\d+) is the largest that fits; --batch_size=(\d+) --gradient_accumulation_steps=(\d+) fits"
    largest, size, micro_steps = map(int, re.search(advice, error).groups())
    assert 1 < size <= largest < 512 and size * micro_steps == 512  # as many sequences a step
    error = run("--memory=2MiB", status=3, batch_size=largest + 1)
    assert f"--batch_size={largest} is the largest that fits" in error
    assert "a smaller batch cannot help: parameters, gradients" in run("--memory=0.1MiB", status=3)
    assert "not even --batch_size=1 fits; use a shorter --block_size" in run("--memory=0.52MiB", status=3)
    assert not (tmp_path / "out").exists()

    monkeypatch.setattr(trainer, "build", build)
    run("--memory=2MiB", batch_size=largest, max_iters=1)
    run("--memory=2MiB", "--overwrite", batch_size=size, gradient_accumulation_steps=micro_steps, max_iters=1)


@pytest.mark.parametrize("memory", ["12", "12gib", "-1GiB", "nanGiB", "GiB"])
def test_memory_wants_a_unit(run, tmp_path, memory):
    error = run(f"--memory={memory}", status=2)
    assert error == f"error: --memory={memory}: expects a size with its unit, such as 39.5GiB or 40GB\n"
    assert not (tmp_path / "out").exists()


def test_a_peak_that_no_table_knows_is_measured(monkeypatch):
    flops, n = machine.matmul_ceiling(torch.device("cpu"), "float32", budget_s=0.01)
    assert flops > 1e6 and n in (256, 512, 1024, 2048)

    def write_local(device):
        raise OSError("read-only")

    monkeypatch.setattr(machine, "matmul_ceiling", lambda device, dtype: (5e9, 256))
    monkeypatch.setattr("hardware.machine.write_local", write_local)
    unknown = DeviceSpec("some processor", "cpu", peak_flops={"bfloat16": 1e9})
    found = machine.with_measured_peak(unknown, torch.device("cpu"), "float32")
    assert found.peak_flops == {"bfloat16": 1e9, "float32": 5e9}
    assert found.source == "measured here: matmul of 256 cubed"
    assert machine.with_measured_peak(found, torch.device("cpu"), "float32") is found


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
    """It is like what torch.compile returns: it refuses to tell its length, so it is neither true nor false."""

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
    bounds = "(compiled: the predicted memory and time are an eager step's, upper bounds)"
    assert f"predicted and measured after step 3 {bounds}" in printed


def test_the_cpu_compiles_only_when_asked(run, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: pytest.fail("compiled unasked"))
    run(max_iters=1)


@pytest.mark.parametrize("fails", [False, True])
def test_the_optimizer_is_compiled_before_the_run_is_predicted_or_the_run_is_eager(run, tmp_path, monkeypatch, fails):
    kernel = None if fails else (lambda *arguments: optimizer.update(*arguments))
    monkeypatch.setattr(preflight, "compiled_update", lambda device: (kernel, "no compiler here" if fails else None))
    monkeypatch.setattr(optimizer, "compiled_update", lambda device: (kernel, None))
    printed = run(out="asked", compile_optimizer=True)
    warnings = [line for line in printed.splitlines() if line.startswith("warning")]
    assert warnings == ["warning     torch.compile failed, so AdamW is eager: no compiler here"] * fails
    assert bool(re.search(r"^compiled    AdamW, as one fused kernel, in \d+\.\d s$", printed, re.M)) is not fails
    assert f"AdamW: {'no (it would save' if fails else 'yes ('}" in printed
    assert read_settings(tmp_path / "asked" / "config.py", Config)["compile_optimizer"] is not fails
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
    assert preflight.compile_summary(config, parameters) == words
