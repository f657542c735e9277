"""What the tests of tools.report and of its pictures share: a small run, the config and the records in its folder."""

from config import Config, resolve
from hardware.spec import DeviceSpec

CPU = DeviceSpec("a CPU, 2 threads", "cpu", 2**34, {"float32": 1e11}, 2e10, "measured here", ("float32",))
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 32, "vocab_size": 300, "batch_size": 3}
ONE = {**SMALL, "gradient_accumulation_steps": 1}


def config_of(device=CPU, **settings):
    return resolve(Config(**{**ONE, **settings}), device)


def record(step, **figures):
    return {"step": step, "loss": 5.7 - step / 50, "lr": 1e-3, "grad_norm": 1.0, "step_s": 0.01,
            "tokens_per_s": 9600.0, "mfu": 0.3, **figures}  # fmt: skip


RECORDS = [
    record(0, step_s=None, tokens_per_s=None, mfu=None),
    *(record(step) for step in range(1, 120)),
    record(120, loss=None),  # its loss was not finite
    {"step": 100, "val_loss": 4.0, "val_bpb": None},
    {"step": 121, "val_loss": None, "val_bpb": None},
]
