"""AdamW by hand: what it steps on (parameter groups), how far (the schedule), what bounds it (clipping, overflow).

Nothing here waits for the device: whether a step is applied is decided by a tensor, where the gradients are.
"""

import math

import torch
from torch import Tensor, nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two groups that hold every trainable parameter once: matrices and embeddings decay, vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]  # unique: a tied tensor comes once
    decay = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    assert {id(p) for p in decay + rest} == {id(p) for p in parameters} and len(decay + rest) == len(parameters)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), equal to torch.optim.AdamW.

    Moments are two more copies of the model, in float32 at least. The step count is a tensor on the device.
    Temporaries: one tensor of the size of the largest parameter.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float = 1e-8):
        self.groups, self.lr, self.betas, self.eps = groups, lr, betas, eps
        self.parameters = [p for group in groups for p in group["params"]]
        dtypes = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(self.parameters, dtypes, strict=True)]
            for _ in range(2)
        )
        self.step_count = torch.zeros((), dtype=torch.float32, device=self.parameters[0].device)

    @torch.no_grad()
    def step(self, grad_scale: Tensor | float = 1.0, apply: Tensor | bool = True):
        """Update every parameter with grad * grad_scale; where `apply` is false, change nothing at all.

        Skipping without asking the host: the gradient is masked to 0, both decays are 1, and the step size is 0.
        """
        device, dtype = self.step_count.device, self.exp_avg[0].dtype
        apply = torch.as_tensor(apply, device=device)
        grad_scale = torch.where(apply, grad_scale, 0.0)
        on = apply.to(dtype)
        self.step_count += apply
        count = self.step_count.to(dtype).clamp(min=1)
        step_size = on * self.lr / (1 - self.betas[0] ** count)
        correction2 = (1 - self.betas[1] ** count).sqrt()
        rates = [on * (1 - beta) for beta in self.betas]
        decays = (1 - on * self.lr * group["weight_decay"] for group in self.groups for _ in group["params"])
        for p, m, v, decay in zip(self.parameters, self.exp_avg, self.exp_avg_sq, decays, strict=True):
            if p.grad is not None:
                grad = torch.where(apply, p.grad, 0.0).to(m.dtype).mul_(grad_scale)
                p.mul_(decay)  # decoupled: on the old weight, never in the moments
                m.lerp_(grad, rates[0])
                v.lerp_(grad.square_(), rates[1])
                update = torch.sqrt(v, out=grad).div_(correction2).add_(self.eps)  # in the same memory
                p.sub_(torch.div(m, update, out=update).mul_(step_size))
                del grad, update  # before the next parameter's

    def zero_grad(self):
        """Free the gradients: the next backward writes them instead of adding to zeros."""
        for p in self.parameters:
            p.grad = None

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """Return (exp_avg, exp_avg_sq) per parameter, in the order of `parameters`."""
        return list(zip(self.exp_avg, self.exp_avg_sq, strict=True))


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Return the global 2-norm of all gradients, a float32 scalar on the device."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """Return what gradients are multiplied by for their norm to be at most `limit` (torch's rule, with its 1e-6)."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


class LossScale:
    """Dynamic loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al. 2018).

    The loss is multiplied by `scale`; a step whose gradients overflow is skipped and halves it, 2,000 good steps in a
    row double it. Other dtypes keep the scale at 1.
    """

    def __init__(self, dtype: str, device):
        self.enabled = dtype == "float16"
        self.scale = torch.tensor(2.0**16 if self.enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, finite: Tensor):
        if not self.enabled:
            return
        self.good_steps = torch.where(finite, self.good_steps + 1, 0)
        grown = torch.where(self.good_steps == 2000, self.scale * 2, self.scale)
        self.good_steps = torch.where(self.good_steps == 2000, 0, self.good_steps)
        self.scale = torch.where(finite, grown, self.scale / 2)


def learning_rate(step: int, config) -> float:
    """Return the learning rate of a step: linear warm-up from above 0, then a cosine to min_lr at lr_decay_iters.

    Finite for every combination of settings: no warm-up, a warm-up longer than the decay, a decay of no steps.
    """
    c = config
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if not c.decay_lr:
        return c.learning_rate
    if step >= c.lr_decay_iters:
        return c.min_lr
    progress = (step - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)  # in [0, 1): warmup <= step < decay
    return c.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (c.learning_rate - c.min_lr)
