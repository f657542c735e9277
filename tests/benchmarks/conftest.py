"""What several tests of the benchmarks need: a nanoGPT checkout, short waits, configs, and the rows of a command."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import __main__, ceilings, shapes, suite, turns
from config import Config, resolve
from hardware.spec import DeviceSpec


@pytest.fixture
def checkout(tmp_path):
    """Return the folder of a small stand-in for a nanoGPT checkout, which a test may change."""
    return shutil.copytree(Path(__file__).parent / "nanogpt_stub", tmp_path / "nanogpt")


@pytest.fixture
def quick(monkeypatch):
    """Leave out the pauses between turns, and the measurements of this machine's peaks."""
    monkeypatch.setattr(turns, "PAUSE", 0)
    monkeypatch.setattr(turns, "WARM_UP", 2)
    for module in (ceilings, suite):
        monkeypatch.setattr(module, "matmul_flops", lambda device, dtype, n: 1e9 * n)
        monkeypatch.setattr(module, "copy_bandwidth", lambda device: 2e9)


@pytest.fixture
def config_of():
    """Return a function: config_of(folder, **settings) is a resolved config of the shape "tiny"."""

    def config_of(folder, **settings):
        shape = dict(zip(shapes.SHAPE, shapes.SHAPES["tiny"], strict=True)) | {"gradient_accumulation_steps": 1}
        settings = shape | {"dtype": "float32", "device": "cpu", "dataset": str(folder)} | settings
        return resolve(Config(**settings), DeviceSpec("a CPU", "cpu"))

    return config_of


@pytest.fixture
def rows_of(capsys):
    """Return a function that runs a command with --json, checks what all commands print, and returns the rows."""

    def rows_of(*argv):
        assert __main__.main([*argv, "--json"]) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert set(found) == {"command", "device", "torch", "threads", "rows"} and found["command"] == argv[0]
        assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
        for row in found["rows"]:
            for key, value in row.items():
                assert not key.endswith(("_s", "seconds", "ratio", "bytes")) or value is None or value > 0, key
                assert "spread" not in key or value[0] <= value[1]
        return found["rows"]

    return rows_of
