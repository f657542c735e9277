"""An optimizer step: forward and backward of each micro-batch, gradient clipping, and the update.

train.py and all benchmarks take their steps here. Nothing in this file waits for the device, prints, or saves.
"""

import itertools
import time

import torch

from data.loader import keyed
from model import autocast, build
from ops.compiling import try_compiler
from optimizer import AdamW, LossScale, clip_factor, gradient_norm, learning_rate, parameter_groups


class Trainer:
    """A model on its device, with optimizer and loss scale. The config's seed determines the initial weights."""

    def __init__(self, config, device: torch.device):
        c = self.config = config
        self.device = device
        self.model = build(c)
        self.model.init_weights(c.seed)
        self.model.to(device)
        compiled = c.compile_optimizer and not c.eval_only
        groups = parameter_groups(self.model, c.weight_decay)
        self.optimizer = AdamW(groups, c.learning_rate, (c.beta1, c.beta2), compiled=compiled)
        self.loss_scale = LossScale(c.dtype, device)
        self.autocast = autocast(c, device)
        self.forward = self.model  # or the compiled model

    @property
    def is_compiled(self) -> bool:
        return self.forward is not self.model

    def compile(self):
        """Compile the model and execute it on a batch of zeros, because compilers fail only at the first call.

        Return (the compiled model, None), or (None, why it failed). In the second case, the model is not compiled.
        """
        compiled, problem = try_compiler(self.compile_and_execute)
        self.forward = self.model if compiled is None else compiled
        return compiled, problem

    def compile_and_execute(self):
        zeros = torch.zeros(self.config.batch_size, self.config.block_size, dtype=torch.int64, device=self.device)
        try:
            compiled = torch.compile(self.model)
            with self.autocast:
                loss = compiled(zeros, zeros, scale=torch.ones((), device=self.device))
            loss.backward()
        finally:
            self.model.zero_grad(set_to_none=True)
        return compiled

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that stay alive during the whole run: parameters, buffers, optimizer state."""
        return [*self.model.parameters(), *self.model.buffers(), *itertools.chain(*self.optimizer.state())]

    def micro_step(self, step: int, i: int, loader):
        """Run forward and backward of micro-batch i. Return its part of the step's loss, and the seconds it waited."""
        start = time.perf_counter()
        x, y = loader.next()
        waited = time.perf_counter() - start
        torch.manual_seed(keyed(self.config.seed, step * self.config.gradient_accumulation_steps + i, "dropout"))
        with self.autocast:
            loss = self.forward(x, y, scale=self.loss_scale.scale / self.config.gradient_accumulation_steps)
        loss.backward()
        return loss.detach() / self.loss_scale.scale, waited

    def step(self, step: int, loader) -> dict:
        """Take one optimizer step and return its figures. The loss and the gradient norm are tensors on the device."""
        c, optimizer, loss_scale = self.config, self.optimizer, self.loss_scale
        optimizer.lr = learning_rate(step, c)
        losses, waits = zip(
            *(self.micro_step(step, i, loader) for i in range(c.gradient_accumulation_steps)), strict=True
        )
        norm = gradient_norm(optimizer.parameters) / loss_scale.scale
        finite = norm.isfinite()
        optimizer.step(clip_factor(norm, c.grad_clip) / loss_scale.scale, apply=finite)
        optimizer.zero_grad()
        loss_scale.update(finite)
        return {"step": step, "loss": sum(losses), "lr": optimizer.lr, "grad_norm": norm, "data_wait_s": sum(waits)}
