"""Formulas that papers print for the memory of a sharded run, with which the tests compare the estimates."""

from cli.errors import require
from cli.units import positive


def zero_bytes_per_gpu(n_params, n_gpus, stage, k=12):
    """Return the bytes of weights, gradients and optimizer on each GPU (Rajbhandari et al. 2020, ZeRO, figure 1).

    A parameter takes 2 bytes as weight, 2 as gradient, k in the optimizer: its float32 copy and Adam's moments, 4 each.
    Stage 1 divides the optimizer over the GPUs, stage 2 the gradients too, stage 3 the weights as well.
    """
    positive(n_params=n_params, n_gpus=n_gpus, k=k)
    require(stage in (0, 1, 2, 3), f"stage={stage!r} must be 0, 1, 2 or 3")
    return n_params * sum(b / (n_gpus if stage >= first else 1) for b, first in ((k, 1), (2, 2), (2, 3)))


def korthikanti_activation_bytes(s, b, h, a, n_layer=1, t=1, sequence_parallel=False, recompute="none"):
    """Return a GPU's saved activations in bytes, 16-bit and with dropout (Korthikanti et al. 2022, table 2).

    A layer of s positions, micro-batch b, width h, a heads: attention 11 sbh + 5 a s^2 b, MLP 19 sbh, norms 4 sbh.
    Tensor parallelism of degree t divides all but 10 sbh (norms, dropout and inputs outside the matmuls), sequence
    parallelism those too. recompute: "selective" drops 5 a s^2 b, "full" keeps 2 sbh, the layer's input. The first
    pipeline stage holds as much as n_layer layers, however many stages there are. Ours differs from this: no dropout
    by default, a fused attention without scores, float32 residuals, copies of weights.
    """
    positive(s=s, b=b, h=h, a=a, n_layer=n_layer, t=t)
    require(recompute in ("none", "selective", "full"), f"recompute={recompute!r} must be none, selective or full")
    scores = 5 * a * s / h if recompute == "none" else 0
    per_sbh = 2 if recompute == "full" else (10 / t if sequence_parallel else 10) + (24 + scores) / t
    return n_layer * s * b * h * per_sbh
