"""The matmul of a linear layer, with a faster implementation for a single row on a CPU."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ops.choices import operation_dtype


def linear(x: Float[Tensor, "*batch n"], weight: Float[Tensor, "m n"], bias=None) -> Float[Tensor, "*batch m"]:
    """x W^T + b.

    In generation on a CPU, x is a single row. Then W is cut into slices, on which all cores work, because torch uses
    one core for the product of a matrix and a vector. The vector is a transposed row, which avoids torch's slow path.
    """
    m, n = weight.shape
    follows_autocast = operation_dtype("row product", "autocast", x.device.type) == "autocast"
    if follows_autocast or x.numel() != n or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    slices = next((s for s in range(max(2, torch.get_num_threads()), 257) if m % s == 0), None)
    if slices is None:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        row = x.to(weight.dtype).reshape(1, 1, n).expand(slices, 1, n)
        y = torch.bmm(rearrange(weight, "(s m) n -> s m n", s=slices), row.mT).view(*x.shape[:-1], m)
    return y if bias is None else y + bias
