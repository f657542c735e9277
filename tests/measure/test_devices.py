"""Which device a setting means: a card that no table knows computes in what its generation has."""

import pytest
import torch

from cli.errors import ConfigError
from config import Config, resolve
from measure.machine import find_device


@pytest.fixture
def card(monkeypatch):
    """Return a function that lets torch see one CUDA card."""

    def card(name, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 16 * 2**30))

    return card


@pytest.mark.parametrize("name", ["Some Card", "NVIDIA TITAN RTX", "NVIDIA GeForce RTX 4090 Laptop GPU"])
@pytest.mark.parametrize(
    "capability, dtype", [((6, 1), "float16"), ((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"),
                          ((8, 6), "bfloat16"), ((9, 0), "bfloat16"), ((12, 0), "bfloat16")],
)  # fmt: skip
def test_a_card_without_bfloat16_takes_float16_and_says_so(card, name, capability, dtype):
    card(name, capability)
    device, spec = find_device("auto")
    assert (device, spec.kind, spec.name) == (torch.device("cuda", 0), "cuda", name)
    assert (spec.memory_bytes, spec.total_bytes) == (10 * 2**30, 16 * 2**30)
    assert resolve(Config(vocab_size=65), spec).dtype == dtype
    asked = Config(vocab_size=65, dtype="bfloat16")
    if dtype == "bfloat16":
        assert resolve(asked, spec).dtype == "bfloat16"
    else:
        with pytest.raises(ConfigError, match="has no bfloat16 matmuls; use --dtype=float16, or auto"):
            resolve(asked, spec)


def test_a_card_of_the_table_keeps_its_peaks_and_takes_the_memory_that_is_free(card):
    card("Tesla T4", (7, 5))
    _, spec = find_device("cuda")
    assert spec.peak("float16") == 65e12 and spec.peak("bfloat16") is None and spec.memory_bytes == 10 * 2**30


def test_a_torch_without_cuda_is_never_asked_for_a_card(monkeypatch):
    """On such a build, to ask for a card's capability is an error."""
    for name in ("get_device_name", "get_device_capability", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: pytest.fail("a card was asked for"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for setting in ("auto", "cpu"):
        device, spec = find_device(setting)
        assert device == torch.device("cpu") and spec.kind == "cpu" and spec.memory_bytes > 0
