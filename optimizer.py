"""AdamW written by hand, with parameter groups, gradient clipping, loss scaling, and the learning-rate schedule.

Nothing here waits for the device: a tensor on the device decides whether a step is applied.
"""

import functools
import inspect
import math

import torch
from torch import Tensor, nn

from ops.compiling import try_compiler


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two groups with every trainable parameter once: matrices and embeddings decay, vectors do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]  # a tied tensor is listed once
    decay = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    assert {id(p) for p in decay + rest} == {id(p) for p in parameters} and len(decay + rest) == len(parameters)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), with the same results as torch.optim.AdamW.

    The moments take twice the memory of the model, in float32 or float64. Compiled, a step reads and writes the memory
    once. Otherwise it does so a dozen times, and needs one temporary of the size of the largest parameter.
    """

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], eps: float = 1e-8, compiled=False):
        self.groups, self.lr, self.betas, self.eps = groups, lr, betas, eps
        self.parameters = [p for group in groups for p in group["params"]]
        dtypes = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]
        self.exp_avg, self.exp_avg_sq = (
            [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(self.parameters, dtypes, strict=True)]
            for _ in range(2)
        )
        self.step_count = torch.zeros((), dtype=torch.float32, device=self.parameters[0].device)
        self.in_one_pass = compiled_update(self.step_count.device)[0] if compiled else None

    def scalars(self, apply: Tensor, grad_scale: Tensor | float) -> Tensor:
        """Count a step. Return update()'s seven scalars as a tensor on the device; step() sets the last, the decay."""
        on, (beta1, beta2) = apply.to(self.exp_avg[0].dtype), self.betas  # on: 1 if the step is applied, else 0
        self.step_count += apply
        count = self.step_count.to(on.dtype).clamp(min=1)
        scale = torch.where(apply, grad_scale, 0.0).to(on.dtype)
        correction = (1 - beta2**count).sqrt()  # of sqrt(v); as a factor of eps and of the step it costs no time
        step_size = on * self.lr * correction / (1 - beta1**count)
        return torch.stack([on, scale, on * (1 - beta1), on * (1 - beta2), self.eps * correction, step_size, on])

    @torch.no_grad()
    def step(self, grad_scale: Tensor | float = 1.0, apply: Tensor | bool = True):
        """Update every parameter with grad * grad_scale. If `apply` is false, change nothing.

        The host does not need to know `apply`: if it is false, the gradient is masked to 0, all decays are 1, and the
        step size is 0.
        """
        scalars = self.scalars(torch.as_tensor(apply, device=self.step_count.device), grad_scale)
        moments = iter(self.state())
        for group in self.groups:
            scalars[-1] = 1 - scalars[0] * self.lr * group["weight_decay"]
            for p, (m, v) in zip(group["params"], moments, strict=False):
                if p.grad is None:
                    continue
                flat = p.is_contiguous() and p.grad.is_contiguous()
                if self.in_one_pass and flat and p.numel() > 1:  # a compiler makes another kernel for a single number
                    self.in_one_pass(*(t.view(-1).data for t in (p, p.grad, m, v)), scalars)
                else:
                    update(p, p.grad, m, v, scalars.unbind())

    def zero_grad(self):
        """Free the gradients. The next backward then writes new ones, instead of adding to zeros."""
        for p in self.parameters:
            p.grad = None

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """Return (exp_avg, exp_avg_sq) per parameter, in the order of `parameters`."""
        return list(zip(self.exp_avg, self.exp_avg_sq, strict=True))


def update(p, grad, m, v, scalars):
    """Update one parameter in place. Compiled, all operations are one kernel, which reads and writes memory once."""
    on, grad_scale, rate1, rate2, eps, step_size, decay = scalars
    grad = torch.where(on > 0, grad, 0.0).to(m.dtype).mul_(grad_scale)
    p.mul_(decay)  # decoupled: it acts on the old weight, and not on the moments
    m.mul_(1 - rate1).addcmul_(grad, rate1)
    v.mul_(1 - rate2).addcmul_(grad.square_(), rate2)
    change = torch.sqrt(v, out=grad).add_(eps)  # in the memory of grad
    p.sub_(torch.div(m, change, out=change).mul_(step_size))


@functools.cache
def compiled_update(device: torch.device):
    """Return (update() as one kernel for flat tensors of any length, None), or (None, why it does not compile)."""

    def compiled():
        kernel = torch.compile(inspect.unwrap(update), dynamic=True)  # without a type checker's wrapper
        with torch.no_grad():  # with long tensors, because the compiler decides by the length whether to use all cores
            kernel(*(torch.zeros(2**20, device=device) for _ in range(4)), torch.zeros(7, device=device))
        return kernel

    return try_compiler(compiled)


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Return the global 2-norm of all gradients, a float32 scalar on the device."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """Return the factor that reduces the norm of the gradients to `limit`, at most 1; the 1e-6 is torch's."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


class LossScale:
    """Dynamic loss scaling for float16, whose gradients underflow below 6e-8 (Micikevicius et al. 2018).

    The loss is multiplied by `scale`. A step whose gradients overflow is skipped, and the scale is halved. After 2,000
    good steps in a row, the scale is doubled. For other dtypes it is always 1.
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
    """Return the learning rate of a step: linear warm-up, then a cosine or linear decay to min_lr at lr_decay_iters.

    It is finite for all settings, also without warm-up, with a warm-up longer than the decay, or without a decay.
    """
    c = config
    if step < c.warmup_iters:
        return c.learning_rate * (step + 1) / (c.warmup_iters + 1)
    if not c.decay_lr:
        return c.learning_rate
    if step >= c.lr_decay_iters:
        return c.min_lr
    progress = (step - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)  # in [0, 1): warmup <= step < decay
    remaining = 1 - progress if c.decay_shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return c.min_lr + remaining * (c.learning_rate - c.min_lr)
