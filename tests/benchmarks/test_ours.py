"""Our tasks: training takes the steps of train.py; prompts fit into the context."""

import dataclasses
import json

import train
from benchmarks import ours, turns
from config import Config
from run import preflight


def test_our_training_takes_the_steps_that_train_py_takes(tmp_path, monkeypatch, config_of):
    monkeypatch.setattr(preflight, "with_measured_peak", lambda spec, device, dtype: spec)
    turns.write_tokens(tmp_path, 65, 5000)
    settings = {"max_iters": 4, "warmup_iters": 2, "eval_iters": 1, "sample_tokens": 0, "learning_rate": 1e-2}
    config = config_of(tmp_path, **settings, out_dir=str(tmp_path / "out"))
    argv = [f"--{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config)]
    assert train.main(argv) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expected = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    training = ours.Training(config)
    assert training.run(3)["losses"] + training.run(1)["losses"] == expected
    training.loader.close()


def test_prompts_leave_room_for_what_is_generated():
    assert ours.generation_lengths(Config()) == (900, 64)
    assert ours.generation_lengths(Config(block_size=64)) == (48, 16)
