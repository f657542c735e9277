"""Cross-entropy without logits: head, softmax and their gradients, a chunk of tokens at a time.

For GPT-2 the logits, (R, V), are the largest tensor of a step by far, and their gradient is as large again. Here
neither exists: a chunk's logits are turned into their own gradient in place, and that into its part of the gradients
of x and of the head. So the gradients are made in forward, and backward hands them on.

Shapes:  R rows, the B T tokens of a micro-batch   C width   V vocabulary
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hardware import CACHED_NUMBERS, HEAD_COLUMNS


class ChunkedCrossEntropy(torch.autograd.Function):
    """scale times the mean of -log softmax(x W^T)[target], in nats; the softmax in float32.

    The scale is in the gradients before they are rounded to x's dtype: float16's would underflow without it.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, scale, chunk):
        wanted = ctx.needs_input_grad[0]
        w, total = weight.to(x.dtype), torch.zeros((), device=x.device)
        if wanted:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            logits = x[rows] @ w.mT
            total += turn_into_gradient(logits, targets[rows], scale / len(x))
            if wanted:
                add_head_gradient(logits, x[rows], dweight)
                torch.mm(logits, w, out=dx[rows])
            del logits
        if wanted:
            ctx.save_for_backward(dx, dweight)
        return total * (scale / len(x))

    @staticmethod
    def backward(ctx, g):
        dx, dweight = ctx.saved_tensors
        if g.device.type != "cpu":  # to look at g would be to wait for it
            return dx.mul_(g), dweight.mul_(g), None, None, None
        return (dx, dweight, None, None, None) if g == 1 else (dx * g, dweight * g, None, None, None)


def turn_into_gradient(logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"], scale) -> Float[Tensor, ""]:
    """Return the sum of the rows' losses, and turn logits into scale times its gradient: softmax less the one-hot."""
    at_a_time = max(1, CACHED_NUMBERS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    total = torch.zeros((), device=logits.device)
    for rows, ids in zip(logits.split(at_a_time), targets.split(at_a_time), strict=True):
        x, own = rows.float() if logits.device.type == "cpu" else rows, ids[:, None]  # its maximum is quicker there
        largest, wanted = x.amax(-1, True), x.gather(1, own)
        p = torch.softmax(x, -1, dtype=torch.float32, out=x if x.dtype == torch.float32 else None)
        # log sum exp, by the largest: its probability is at least 1 / V
        total += (largest - p.amax(-1, True).log() - wanted).sum()
        p.scatter_(1, own, p.gather(1, own) - 1)
        rows.copy_(p.mul_(scale))
        del x, p  # before the next ones are made
    return total


def add_head_gradient(dlogits: Float[Tensor, "R V"], x: Float[Tensor, "R C"], dweight: Float[Tensor, "V C"]):
    """Add dlogits^T x to the gradient of the head, which is in float32 and so adds up without rounding."""
    for columns, d in zip(dlogits.split(HEAD_COLUMNS, 1), dweight.split(HEAD_COLUMNS), strict=True):
        d += columns.mT @ x
