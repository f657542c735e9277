"""The head and the cross-entropy, with their gradients, for one chunk of tokens at a time.

For GPT-2, the logits (R, V) are by far the largest tensor of a step, and their gradient is as large. Here neither
exists as a whole. The gradient of a chunk's logits overwrites the logits, and its parts of the gradients of x and of
the head are computed from it at once. So forward computes the gradients, and backward only returns them.

Shapes:  R rows, the B T tokens of a micro-batch   C width   V vocabulary
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ops.choices import CPU_CACHE_FLOATS, HEAD_COLUMNS


class ChunkedCrossEntropy(torch.autograd.Function):
    """scale times the mean of -log softmax(x W^T)[target], in nats, with the softmax in float32.

    The gradients are multiplied by the scale before they are rounded to x's dtype, as float16 would underflow
    otherwise.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, scale, chunk):
        with_gradients = ctx.needs_input_grad[0]
        w, total = weight.to(x.dtype), torch.zeros((), device=x.device)
        if with_gradients:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits = x[rows] @ w.mT
            total += turn_into_gradient(logits, targets[rows], scale / len(x))
            if with_gradients:
                add_head_gradient(logits, x[rows], dweight)
                torch.mm(logits, w, out=dx[rows])
            del logits
        if with_gradients:
            ctx.save_for_backward(dx, dweight)
        return total * (scale / len(x))

    @staticmethod
    def backward(ctx, g):
        dx, dweight = ctx.saved_tensors
        if g.device.type != "cpu":  # comparing g with 1 would wait for the device
            return dx.mul_(g), dweight.mul_(g), None, None, None
        return (dx, dweight, None, None, None) if g == 1 else (dx * g, dweight * g, None, None, None)


def turn_into_gradient(logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"], scale) -> Float[Tensor, ""]:
    """Return the sum of the rows' losses. Overwrite the logits with scale times its gradient, softmax - one-hot."""
    at_a_time = max(1, CPU_CACHE_FLOATS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    total = torch.zeros((), device=logits.device)
    for rows, ids in zip(logits.split(at_a_time), targets.split(at_a_time), strict=True):
        x = rows.float() if logits.device.type == "cpu" else rows  # a CPU finds the maximum of float32 faster
        largest, of_target = x.amax(-1, True), x.gather(1, ids[:, None])
        p = torch.softmax(x, -1, dtype=torch.float32, out=x if x.dtype == torch.float32 else None)
        # log-sum-exp, from the largest logit, whose probability is at least 1 / V
        total += (largest - p.amax(-1, True).log() - of_target).sum()
        p.scatter_(1, ids[:, None], p.gather(1, ids[:, None]) - 1)
        rows.copy_(p.mul_(scale))
        del x, p  # they are freed before the next ones are allocated
    return total


def add_head_gradient(dlogits: Float[Tensor, "R V"], x: Float[Tensor, "R C"], dweight: Float[Tensor, "V C"]):
    """Add dlogits^T x to the gradient of the head, whose sums are in float32."""
    for columns, d in zip(dlogits.split(HEAD_COLUMNS, 1), dweight.split(HEAD_COLUMNS), strict=True):
        d += columns.mT @ x
