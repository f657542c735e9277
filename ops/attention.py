"""Causal attention of whole sequences on a CPU, in the dtype of matmuls, one tile of heads and queries at a time.

On a CPU, torch's fused kernel gains little from bfloat16, and is much slower in it for short sequences. Here the scores
of a tile are one batched matmul, which leaves out the keys after the tile's last query. Backward computes the scores
again, so none are saved (Dao et al. 2022).

Shapes:  B batch   H query heads   K key-value heads   G = H / K   N = B K   T positions   D width of a head
         a tile has n of the N, and t queries of each of their G heads: R = G t rows, which see the first s keys
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.choices import score_tiles


class TiledAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v with a causal mask. q is (B, H, T, D), k and v are (B, K, T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        B, H, T, D = q.shape
        q, k, v = by_head(q).mul_(D**-0.5), by_head(k), by_head(v)
        q = q.view(len(k), -1, T, D)
        y, out = torch.empty_like(q), q.new_empty(B, T, H, D)
        for n, queries in score_tiles(*q.shape[:3]):
            rows, keys = q[n, :, queries], slice(queries.stop)
            p = weights(rows, k[n, keys])
            y[n, :, queries] = (p @ v[n, keys]).view(rows.shape)
            del p  # it is freed before the next tile's weights are allocated
        ctx.save_for_backward(q, k, v)
        return out.copy_(rearrange(y, "(b k) g t d -> b t (k g) d", b=B)).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        B, H, T, D = dy.shape
        dy = by_head(dy).view(q.shape)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)  # tiles are added to dk and dv
        for n, queries in score_tiles(*q.shape[:3]):
            rows, keys, drows = q[n, :, queries], slice(queries.stop), dy[n, :, queries].flatten(1, 2)
            p = weights(rows, k[n, keys])
            dv[n, keys].baddbmm_(p.mT, drows)
            # p (dp - sum(p dp)), by the function that autograd uses
            dscores = torch._softmax_backward_data(drows @ v[n, keys].mT, p, -1, p.dtype)
            del p, drows
            dk[n, keys].baddbmm_(dscores.mT, rows.flatten(1, 2))
            dq[n, :, queries] = (dscores @ k[n, keys]).view(rows.shape)
            del dscores
        return dq.mul_(D**-0.5).view(B, H, T, D), dk.view(B, -1, T, D), dv.view(B, -1, T, D)


def by_head(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "BH T D"]:
    """Return a copy in which the rows of each head are adjacent, as batched matmuls need them."""
    return x.new_empty(x.shape).copy_(x).flatten(0, 1)


def weights(q: Float[Tensor, "n G t D"], k: Float[Tensor, "n s D"]) -> Float[Tensor, "n R s"]:
    """Return the softmax of a tile's scores. Its queries are at the last t of the s positions."""
    t = q.shape[2]
    scores = q.flatten(1, 2) @ k.mT
    scores.view(*q.shape[:3], -1)[..., -t:] += scores.new_full((t, t), -torch.inf).triu_(1)
    return torch.softmax(scores, -1, out=scores)
