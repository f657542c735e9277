"""Causal attention of whole sequences on a CPU, in the dtype of matmuls: a tile of heads and queries at a time.

There torch's fused kernel gains little by bfloat16, and loses much at short lengths. Here the scores of a tile are one
batched matmul that leaves out the keys behind its last query, and backward makes them again, so that none are kept
(Dao et al. 2022).

Shapes:  B batch   H query heads   K key-value heads   G = H / K   N = B K   T positions   D width of a head
         a tile: n of the N, with t queries for each of G heads, R = G t rows, which see the first s keys
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from hardware import score_tiles


class TiledAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v, where a position sees those up to itself; q is (B, H, T, D), k and v (B, K, T, D)."""

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
            del p  # before the next tile's are made
        ctx.save_for_backward(q, k, v)
        return out.copy_(rearrange(y, "(b k) g t d -> b t (k g) d", b=B)).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        B, H, T, D = dy.shape
        dy = by_head(dy).view(q.shape)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)  # dk and dv add up
        for n, queries in score_tiles(*q.shape[:3]):
            rows, keys, d = q[n, :, queries], slice(queries.stop), dy[n, :, queries].flatten(1, 2)
            p = weights(rows, k[n, keys])
            dv[n, keys].baddbmm_(p.mT, d)
            # p (dp - sum of p dp), as autograd has it
            dscores = torch._softmax_backward_data(d @ v[n, keys].mT, p, -1, p.dtype)
            del p, d
            dk[n, keys].baddbmm_(dscores.mT, rows.flatten(1, 2))
            dq[n, :, queries] = (dscores @ k[n, keys]).view(rows.shape)
            del dscores
        return dq.mul_(D**-0.5).view(B, H, T, D), dk.view(B, -1, T, D), dv.view(B, -1, T, D)


def by_head(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "BH T D"]:
    """Return a copy in which the rows of a head follow each other, as batched matmuls want them."""
    return x.new_empty(x.shape).copy_(x).flatten(0, 1)


def weights(q: Float[Tensor, "n G t D"], k: Float[Tensor, "n s D"]) -> Float[Tensor, "n R s"]:
    """Return the softmax of a tile's scores, whose queries are at the last t of the s positions."""
    t = q.shape[2]
    scores = q.flatten(1, 2) @ k.mT
    scores.view(*q.shape[:3], -1)[..., -t:] += scores.new_full((t, t), -torch.inf).triu_(1)
    return torch.softmax(scores, -1, out=scores)
