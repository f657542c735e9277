"""One run on many GPUs, as arithmetic: this version trains in one process, so nothing here was held against a run.

Data parallel with everything sharded (ZeRO-3, Rajbhandari et al. 2020; FSDP): each GPU keeps 1/n of weights, gradients
and optimizer state, and gathers a block's weights when it comes to that block. Where a step has fewer sequences than
there are GPUs, so many share a sequence, tensor and sequence parallel (Korthikanti et al. 2022).
"""

from dataclasses import replace

from config import require
from prediction import Timeline, predict
from schedule import SIZES, schedule
from units import mib, positive

SHARDED = ("parameters", "gradients", "optimizer state", "weight copies")


def degrees(config, n_gpus):
    """Return (replicas, GPUs that share a sequence, micro-batch, micro-steps) of a run on n_gpus."""
    require(1 <= n_gpus <= 10**6, f"--n_gpus={n_gpus} must lie in [1, 1000000]")
    sequences = config.batch_size * config.gradient_accumulation_steps
    if n_gpus <= sequences:
        near = [n for n in range(n_gpus, 0, -1) if sequences % n == 0][:1]
        near += [n for n in range(n_gpus, sequences + 1) if sequences % n == 0][:1]
        way_out = f"{' and '.join(map(str, near))} do"
        divides = sequences % n_gpus == 0
        require(divides, f"--n_gpus={n_gpus} does not divide the {sequences:,} sequences of a step; {way_out}")
        each = sequences // n_gpus
        micro_batch = max(b for b in range(1, min(each, config.batch_size) + 1) if each % b == 0)
        return n_gpus, 1, micro_batch, each // micro_batch
    share, rest = divmod(n_gpus, sequences)
    require(rest == 0, f"--n_gpus={n_gpus} is no multiple of the {sequences:,} sequences of a step")
    shared = f"{share} GPUs would share each of the {sequences:,} sequences of a step"
    require(config.model == "transformer", f"--n_gpus={n_gpus}: {shared}, and an MLP has no heads to divide")
    divides = config.n_head % share == 0
    require(divides, f"--n_gpus={n_gpus}: {shared}, and n_head={config.n_head} does not divide by {share}")
    return sequences, share, 1, 1


def on_cluster(config, device, n_gpus, memory_bytes=None, mfu=None):
    """Return what each of n_gpus holds at its peak, what a step moves between them, and how long it takes.

    Held at the peak: 1/n of all states, two blocks' gathered weights (one computes, the next arrives) and a block's
    gradients before they are scattered, and the activations and logits of one GPU's micro-batch. Moved by each GPU:
    weights gathered for forward and again for backward, gradients scattered, once per micro-step; where GPUs share a
    sequence, each layer's activations four times forward and four backward. Time is that of the FLOPs alone: what is
    moved hides behind them if the links are as fast as `bandwidth_to_hide`.
    """
    replicas, share, micro_batch, micro_steps = degrees(config, n_gpus)
    own = replace(config, batch_size=micro_batch, gradient_accumulation_steps=micro_steps)
    s = schedule(own, device)
    t = Timeline(s)
    passing = [b for b in t.first if t.category(b) not in SHARDED]
    standing = sum(b.bytes for b in s.standing if b.kind not in ("param", "state"))
    states = sum(b.bytes * b.repeat for b in s.standing if b.kind in ("param", "state"))
    params = sum(p.bytes * p.repeat for p in s.params.values())
    block = max(sum(p.numel for name, p in s.params.items() if name.startswith(f"blocks.{i}.")) for i in range(2))
    table = max(p.numel for p in s.params.values())  # the embedding is a unit of its own
    size, unit = SIZES[config.dtype], max(block, table) // share
    held = {
        "states": -(-(states + params) // n_gpus),
        "gathered": (2 * size + 4) * unit,
        "activations": max(t.bytes_over_time(passing, standing)) // share,
    }
    gathered = (2 * size + 4) * (params // 4 // share) * (replicas - 1) // replicas
    activations = 8 * config.n_layer * micro_batch * config.block_size * config.n_embd * size * (share - 1) // share
    moved = micro_steps * (gathered + activations)
    step_s = predict(config, device, mfu=mfu)["time"]["step_s"]
    step_s = step_s and step_s / n_gpus
    available = memory_bytes or device.memory_bytes
    peak = sum(held.values())
    return {
        "n_gpus": n_gpus, "replicas": replicas, "gpus_per_sequence": share, "batch_size": micro_batch,
        "micro_steps": micro_steps, "memory": held, "peak": peak, "fits": peak <= available if available else None,
        "moved_bytes": moved, "step_s": step_s, "bandwidth_to_hide": step_s and moved / step_s,
    }  # fmt: skip


def fewest(config, device, memory_bytes, most=4096):
    """Return on_cluster for the least power of two of GPUs on which the config fits, with recompute="block" if not even
    so many have room without; None where none does.
    """
    sequences = config.batch_size * config.gradient_accumulation_steps
    for recompute in dict.fromkeys((config.recompute, "block")):
        n_gpus = 2
        while n_gpus <= min(most, sequences):
            if sequences % n_gpus == 0:
                found = on_cluster(replace(config, recompute=recompute), device, n_gpus, memory_bytes)
                if found["fits"]:
                    return found | {"recompute": recompute}
            n_gpus *= 2
    return None


def spread(time, result):
    """Return the times of a prediction as those of the cluster."""
    n = result["n_gpus"]
    faster = {key: time[key] and time[key] / n for key in ("step_s", "least_s", "total_s", "days")}
    return time | faster | {"tokens_per_s": time["tokens_per_s"] and time["tokens_per_s"] * n}


def lines(result, device):
    """Yield it as text."""
    r = result
    shared = f", {r['gpus_per_sequence']} to a sequence" if r["gpus_per_sequence"] > 1 else ""
    own = f"{r['batch_size']} sequences x {r['micro_steps']:,} micro-steps each"
    yield f"cluster     {r['n_gpus']:,} x {device.name}, as arithmetic: no run of this version has checked it"
    yield f"            {r['replicas']:,} replicas{shared}, {own}, everything sharded (ZeRO-3)"
    notes = {"states": "weights, gradients and moments over all", "gathered": "two blocks' weights, one's gradients",
             "activations": "and logits, of its micro-batch"}  # fmt: skip
    yield from (f"  {name:<17}{mib(n):>12}  {notes[name]}" for name, n in r["memory"].items())
    verdict = {True: "fits", False: "does not fit", None: ""}[r["fits"]]
    yield f"  {'peak of each':<17}{mib(r['peak']):>12}  {verdict}"
    hidden = f", hidden if links carry {r['bandwidth_to_hide'] / 1e9:,.1f} GB/s" if r["bandwidth_to_hide"] else ""
    yield f"  {'moved by each':<17}{mib(r['moved_bytes']):>12}  a step{hidden}"


# --- published formulas, beside the reckoning above


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
