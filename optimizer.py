"""AdamW by hand: what it steps on (parameter groups), how far (the schedule), what bounds it (clipping, overflow).

Nothing here waits for the device: whether a step is applied is decided by a tensor, where the gradients are.
"""

import functools
import inspect
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

    Moments are two more copies of the model, in float32 at least. The step count is a tensor on the device. Compiled,
    a step passes once over memory; eager, a dozen times, with one temporary of the size of the largest parameter.
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
        """Count a step; return what update takes beside tensors, (7,), on the device. The last is each group's own."""
        on, (beta1, beta2) = apply.to(self.exp_avg[0].dtype), self.betas
        self.step_count += apply
        count = self.step_count.to(on.dtype).clamp(min=1)
        scale = torch.where(apply, grad_scale, 0.0).to(on.dtype)
        correction = (1 - beta2**count).sqrt()  # of v's root: as a factor of eps and of the step, no pass over memory
        step_size = on * self.lr * correction / (1 - beta1**count)
        return torch.stack([on, scale, on * (1 - beta1), on * (1 - beta2), self.eps * correction, step_size, on])

    @torch.no_grad()
    def step(self, grad_scale: Tensor | float = 1.0, apply: Tensor | bool = True):
        """Update every parameter with grad * grad_scale; where `apply` is false, change nothing at all.

        Skipping without asking the host: the gradient is masked to 0, all decays are 1, and the step size is 0.
        """
        scalars = self.scalars(torch.as_tensor(apply, device=self.step_count.device), grad_scale)
        moments = iter(self.state())
        for group in self.groups:
            scalars[-1] = 1 - scalars[0] * self.lr * group["weight_decay"]
            for p, (m, v) in zip(group["params"], moments, strict=False):
                if p.grad is None:
                    continue
                flat = p.is_contiguous() and p.grad.is_contiguous()
                if self.in_one_pass and flat and p.numel() > 1:  # compilers make another kernel for single numbers
                    self.in_one_pass(*(t.view(-1).data for t in (p, p.grad, m, v)), scalars)
                else:
                    update(p, p.grad, m, v, scalars.unbind())

    def zero_grad(self):
        """Free the gradients: the next backward writes them instead of adding to zeros."""
        for p in self.parameters:
            p.grad = None

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """Return (exp_avg, exp_avg_sq) per parameter, in the order of `parameters`."""
        return list(zip(self.exp_avg, self.exp_avg_sq, strict=True))


def update(p, grad, m, v, scalars):
    """Step on one parameter, in place. Eager, each operation passes over memory; compiled, all of them at once."""
    on, grad_scale, rate1, rate2, eps, step_size, decay = scalars
    grad = torch.where(on > 0, grad, 0.0).to(m.dtype).mul_(grad_scale)
    p.mul_(decay)  # decoupled: on the old weight, never in the moments
    m.mul_(1 - rate1).addcmul_(grad, rate1)
    v.mul_(1 - rate2).addcmul_(grad.square_(), rate2)
    change = torch.sqrt(v, out=grad).add_(eps)  # in the same memory
    p.sub_(torch.div(m, change, out=change).mul_(step_size))


@functools.cache
def compiled_update(device: torch.device):
    """Return update as one kernel for flat tensors of any length, and None; or None and why it does not compile."""

    def compiled():
        kernel = torch.compile(inspect.unwrap(update), dynamic=True)  # without a type checker that may be around it
        with torch.no_grad():  # tried on a long one, as the compiler decides by that whether all cores take part
            kernel(*(torch.zeros(2**20, device=device) for _ in range(4)), torch.zeros(7, device=device))
        return kernel

    return try_compiler(compiled)


def try_compiler(compiled):
    """Return compiled(), which also runs what it compiled, and None; or None and why that failed."""
    try:
        return compiled(), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in ways of their own: no gcc, no Triton, an unknown card
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]


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
    """Return the learning rate of a step: a line up from above 0, then a cosine or a line to min_lr at lr_decay_iters.

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
    left = 1 - progress if c.decay_shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return c.min_lr + left * (c.learning_rate - c.min_lr)
