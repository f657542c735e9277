"""Small runs for the tests of checkpoints: every tensor in them is known to the bit."""

import dataclasses

import torch
from torch import nn

from config import Config, resolve
from hardware.spec import DeviceSpec
from model import build
from optimizer import AdamW, LossScale, parameter_groups
from run.checkpoint import clean

CONFIG = resolve(
    Config(n_layer=2, n_head=2, n_embd=8, block_size=4, vocab_size=11, bias=True, dtype="float16"),
    DeviceSpec("a processor", "cpu"),
)


class Wrapper(nn.Module):
    """It does to the names what DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": torch.compile,  # wraps at once and compiles at the first call
    "ddp": Wrapper,
    "compiled ddp": lambda model: torch.compile(Wrapper(model)),
    "ddp of compiled": lambda model: Wrapper(torch.compile(model)),
}


@dataclasses.dataclass
class SmallRun:
    """The parts of a Trainer that a checkpoint holds."""

    model: nn.Module
    optimizer: AdamW
    loss_scale: LossScale


def run_of(config=CONFIG, seed=0, steps=0, wrap="plain"):
    """Return a run after some steps on random gradients."""
    model = build(config)
    model.init_weights(seed)
    model = WRAPPERS[wrap](model)
    run = SmallRun(model, AdamW(parameter_groups(model, 0.1), 1e-2, (0.9, 0.95)), LossScale(config.dtype, "cpu"))
    for step in range(steps):
        one_step(run, seed + step)
    return run


def one_step(run, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in run.optimizer.parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    run.optimizer.step()
    run.loss_scale.update(torch.tensor(seed % 3 != 1))  # an overflow now and then


def state_at(step):
    return {
        "step": step, "best_val_loss": 1.25, "config": dataclasses.asdict(CONFIG), "tokenizer": {"kind": "byte"},
    }  # fmt: skip


def tensors_of(run):
    """Return every tensor that makes the run what it is, by name."""
    names = {id(p): clean(name) for name, p in run.model.named_parameters()}
    tensors = {"step_count": run.optimizer.step_count}
    tensors |= {"scale": run.loss_scale.scale, "good_steps": run.loss_scale.good_steps}
    for p, (m, v) in zip(run.optimizer.parameters, run.optimizer.state(), strict=True):
        tensors |= {names[id(p)]: p.detach(), f"m {names[id(p)]}": m, f"v {names[id(p)]}": v}
    return tensors


def same(ones, others):
    """Return whether the tensors agree bit for bit, dtypes included."""
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype and torch.equal(ones[name], others[name]) for name in ones
    )


def contents(folder):
    """Return the bytes of each file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
