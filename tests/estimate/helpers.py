"""Configs, hardware and a real training step that several tests of the estimates share."""

import pytest
import torch

from cli.config_file import read_settings
from cli.errors import ConfigError
from config import ROOT, Config, resolve
from estimate.memory import Timeline
from estimate.step import training_step
from hardware.spec import DeviceSpec
from trainer import Trainer

CPU = DeviceSpec(
    "a CPU", "cpu", 2**34, {"bfloat16": 4e11, "float32": 2e11}, source="a test", dtypes=("float32", "bfloat16")
)
UNKNOWN = DeviceSpec("a device", "cpu")  # without memory, peaks or bandwidth
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
LLAMA = {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False}
LONG = {"n_layer": 1, "n_embd": 16, "block_size": 600, "vocab_size": 20, "batch_size": 1}
GRID = {
    "gpt2": {},
    "gpt2 with bias, untied": {"bias": True, "tie_weights": False},
    "odd sizes": {"bias": True, "batch_size": 1, "block_size": 7, "n_embd": 36, "tie_weights": False},
    "dropout": {"dropout": 0.1, "bias": True},
    "attn_dropout": {"attn_dropout": 0.1},
    "attn_dropout with groups": {"attn_dropout": 0.1, "n_kv_head": 2},
    "llama": LLAMA,
    "llama, one key-value head": {**LLAMA, "n_kv_head": 1, "head_dim": 24, "d_ff": 100, "tie_weights": True},
    "qk_norm, relu2, rope": {"pos": "rope", "norm": "rmsnorm", "qk_norm": True, "activation": "relu2"},
    "layernorm with rope, dropout": {"pos": "rope", "qk_norm": True, "dropout": 0.2},
    "mlp": {"model": "mlp"},
    "mlp with rmsnorm": {"model": "mlp", "mlp_context": 3, "norm": "rmsnorm", "bias": True, "dropout": 0.1},
    "chunked loss": {"loss_chunk": 32},
    "chunked loss, a rest": {"loss_chunk": 40, "vocab_size": 9000, "bias": True, "tie_weights": False},
    "chunked loss, untied": {**LLAMA, "loss_chunk": 7, "batch_size": 1},
    "wide, few tokens": {"n_embd": 256, "block_size": 8, "batch_size": 1, "vocab_size": 20},
    "tall, small vocabulary": {"n_layer": 4, "n_embd": 128, "block_size": 64, "vocab_size": 20},
    "peak in attention": LONG,
    "peak in attention, grouped heads": {**LONG, "n_kv_head": 2, "batch_size": 3},
}  # fmt: skip
RECOMPUTED = {  # the rows of GRID again, with something computed twice
    f"{name}, {recompute}": {**GRID[name], "recompute": recompute}
    for name in (
        "gpt2",
        "gpt2 with bias, untied",
        "dropout",
        "attn_dropout with groups",
        "llama",
        "qk_norm, relu2, rope",
        "mlp",
        "chunked loss",
    )
    for recompute in ("attention", "block")
    if not (name == "mlp" and recompute == "attention")
}
ALL = {**GRID, **RECOMPUTED}
GPT2_124M = {  # as other people measured it: one sequence, all logits at once
    "loss_chunk": None,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "batch_size": 1,
    "vocab_size": 50257,
}
GPT2 = Config(**read_settings(ROOT / "configs" / "gpt2.py", Config))


def config_of(**settings):
    """Return SMALL with other settings, resolved for CPU."""
    own = {"gradient_accumulation_steps": 1, "compile_optimizer": False, "dtype": "float32"}
    return resolve(Config(**{**SMALL, **own, **settings}), CPU)


def total_flops(config):
    """Return the FLOPs of a step, those that are computed again included."""
    return sum(op.flops * op.times for op in training_step(config, CPU).ops)


def peak(config, spec):
    """Return the predicted peak of a resolved config in bytes."""
    return Timeline(training_step(config, spec)).peak


def message_of(ask):
    """Return the message of the user's mistake that ask() raises, which must be one line."""
    with pytest.raises(ConfigError) as error:
        ask()
    assert "\n" not in str(error.value)
    return str(error.value)


class TorchStep:
    """A training step as trainer.py takes it, again and again on one batch of random tokens."""

    def __init__(self, config):
        self.config, self.trainer = config, Trainer(config, torch.device("cpu"))
        self.model = self.trainer.model
        shape = (config.batch_size, config.block_size)
        self.x, self.y = torch.randint(config.vocab_size, shape), torch.randint(config.vocab_size, shape)

    def next(self):
        """Return the batch, as a loader does."""
        return self.x, self.y

    def forward(self):
        """Return the loss of the batch, ready for a backward."""
        with self.trainer.autocast:
            return self.model(self.x, self.y, scale=1 / self.config.gradient_accumulation_steps)

    def __call__(self):
        return self.trainer.step(0, self)

    def persistent(self):
        """Return the tensors that are alive before the step and after it."""
        return [*self.trainer.tensors(), self.x, self.y]
