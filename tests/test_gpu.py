"""What needs an accelerator; `pytest -m gpu` runs it."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import train
from config import Config, resolve
from data.loader import Dataset, Loader
from estimate.predict import predict
from measure.machine import find_device
from measure.step import profiled_peak
from model import build
from optimizer import AdamW, clip_factor, gradient_norm, parameter_groups

pytestmark = pytest.mark.gpu
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "vocab_size": 5000, "batch_size": 8}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False}
GRID = {
    "gpt2": {},
    "gpt2 with bias and dropout": {"bias": True, "dropout": 0.1},
    "llama": LLAMA,
    "mlp": {"model": "mlp"},
}


@pytest.fixture
def data(tmp_path):
    """Write a small data set of random ids, as nanoGPT lays one out; return its folder."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split, n in (("train", 20_000), ("val", 3_000)):
        np.random.default_rng(0).integers(0, 5000, n).astype("<u2").tofile(folder / f"{split}.bin")
    return folder


def config_of(**settings):
    settings = {**SMALL, "gradient_accumulation_steps": 1, "compile": False, **settings}
    device, spec = find_device("cuda")
    return device, spec, resolve(Config(**settings), spec)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", GRID)
def test_the_predicted_peak_is_the_allocators(shape, dtype, accumulation):
    device, spec, config = config_of(dtype=dtype, gradient_accumulation_steps=accumulation, **GRID[shape])
    model = build(config)
    model.init_weights(0)
    model.to(device)
    optimizer = AdamW(parameter_groups(model, 0.1), 1e-3, (0.9, 0.95))
    x = torch.randint(config.vocab_size, (config.batch_size, config.block_size), device=device)

    def step():
        for _ in range(accumulation):
            with torch.autocast("cuda", getattr(torch, dtype), enabled=dtype != "float32"):
                loss = model(x, x)
            loss.backward()
            del loss
        norm = gradient_norm(optimizer.parameters)
        optimizer.step(clip_factor(norm, 1.0), apply=norm.isfinite())
        optimizer.zero_grad()

    step()
    persistent = [*model.parameters(), *model.buffers(), *itertools.chain(*optimizer.state())]
    measured, *_ = profiled_peak(step, persistent, device)
    assert math.isclose(predict(config, spec)["memory"]["peak"], measured, rel_tol=0.03)


def test_batches_arrive_as_they_are_on_the_cpu(data):
    device, _, config = config_of(dataset=str(data))
    dataset = Dataset(config)
    loader = Loader(dataset, config, device, first_step=0)
    for step in range(20):
        x, y = loader.next()
        assert x.device == y.device == device
        assert torch.equal(torch.stack((x, y)).cpu(), dataset.batch(config, step, 0))
    loader.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_on_the_gpu_trains_resumes_and_settles_its_ledger(data, tmp_path, compiled):
    out = tmp_path / "out"
    settings = {**SMALL, "dataset": data, "out_dir": out, "device": "cuda", "gradient_accumulation_steps": 1,
                "warmup_iters": 1, "eval_interval": 5, "eval_iters": 2, "compile": compiled}  # fmt: skip
    argv = [f"--{name}={value}" for name, value in settings.items()]
    assert train.main([*argv, "--max_iters=5"]) == 0
    assert train.main([*argv, "--max_iters=10", "--init_from=resume"]) == 0
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["step"] for r in steps if "loss" in r] == list(range(10))
    rows = {row["figure"]: row for row in json.loads((out / "ledger.json").read_text(encoding="utf-8"))["rows"]}
    assert rows["FLOPs per step"]["ratio"] == 1 and rows["peak memory"]["ratio"] < 1.03


def test_float32_losses_agree_with_the_cpus():
    device, _, config = config_of(dtype="float32")
    model = build(config)
    model.init_weights(0)
    x = torch.randint(config.vocab_size, (2, config.block_size))
    on_cpu = model(x, x).item()
    on_gpu = model.to(device)(x.to(device), x.to(device)).item()
    assert math.isclose(on_cpu, on_gpu, rel_tol=1e-4)
