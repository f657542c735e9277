"""One run on many GPUs. All of this is calculated: this version trains in one process, so no run has checked it.

The run is data parallel, and everything is sharded (ZeRO-3, Rajbhandari et al. 2020; FSDP): each GPU keeps 1/n of the
weights, gradients and optimizer state, and gathers the weights of a block when it reaches that block. If a step has
fewer sequences than there are GPUs, several GPUs share a sequence by tensor and sequence parallelism (Korthikanti et
al. 2022).
"""

from dataclasses import replace

from cli.errors import DoesNotFit, require
from cli.units import mib
from estimate.memory import Timeline
from estimate.predict import predict
from estimate.report import fits_line, run_lines, time_lines
from estimate.step import training_step
from estimate.tape import SIZES

SHARDED = ("parameters", "gradients", "optimizer state", "weight copies")  # categories of Timeline.category


def degrees(config, n_gpus):
    """Return (replicas, GPUs that share a sequence, micro-batch, micro-steps) of a run on n_gpus."""
    require(1 <= n_gpus <= 10**6, f"--n_gpus={n_gpus} must lie in [1, 1000000]")
    sequences = config.batch_size * config.gradient_accumulation_steps
    if n_gpus <= sequences:
        near = [n for n in range(n_gpus, 0, -1) if sequences % n == 0][:1]
        near += [n for n in range(n_gpus, sequences + 1) if sequences % n == 0][:1]
        do = f"{' and '.join(map(str, near))} do"
        divides = sequences % n_gpus == 0
        require(divides, f"--n_gpus={n_gpus} does not divide the {sequences:,} sequences of a step; {do}")
        per_gpu = sequences // n_gpus
        micro_batch = max(b for b in range(1, min(per_gpu, config.batch_size) + 1) if per_gpu % b == 0)
        return n_gpus, 1, micro_batch, per_gpu // micro_batch
    share, rest = divmod(n_gpus, sequences)
    require(rest == 0, f"--n_gpus={n_gpus} is not a multiple of the {sequences:,} sequences of a step")
    shared = f"{share} GPUs would share each of the {sequences:,} sequences of a step"
    require(config.model == "transformer", f"--n_gpus={n_gpus}: {shared}, but an MLP has no heads to divide among them")
    divides = config.n_head % share == 0
    require(divides, f"--n_gpus={n_gpus}: {shared}, but n_head={config.n_head} does not divide by {share}")
    return sequences, share, 1, 1


def on_cluster(config, spec, n_gpus, memory_bytes=None, mfu=None):
    """Return what each of n_gpus holds at its peak, what it sends and receives in a step, and how long a step takes.

    At the peak, a GPU holds 1/n of all states, the gathered weights of two blocks (one computes while the next
    arrives), the gradients of a block before they are scattered, and the activations and logits of its micro-batch.

    In each micro-step, a GPU gathers the weights for forward and again for backward, and scatters the gradients. If
    GPUs share a sequence, each layer also moves its activations four times in forward and four times in backward.

    The time is that of the FLOPs alone. It holds if communication overlaps with computation completely, for which the
    links have to be as fast as `bandwidth_to_hide`.
    """
    replicas, share, micro_batch, micro_steps = degrees(config, n_gpus)
    config_per_gpu = replace(config, batch_size=micro_batch, gradient_accumulation_steps=micro_steps)
    s = training_step(config_per_gpu, spec)
    params = sum(p.bytes * p.repeat for p in s.params.values())
    states = params + sum(b.bytes * b.repeat for b in s.persistent if b.kind in ("param", "state"))  # with gradients
    # A parameter is gathered twice in the dtype of matmuls, and its gradient is in float32.
    size = SIZES[config.dtype]
    gathered = 2 * size + 4
    held = {
        "states": -(-states // n_gpus),
        "gathered": gathered * (largest_unit(s) // share),
        "activations": most_activations(s) // share,
    }
    weights_moved = gathered * (params // 4 // share) * (replicas - 1) // replicas
    elements = micro_batch * config.block_size * config.n_embd
    activations_moved = 8 * config.n_layer * elements * size * (share - 1) // share
    moved = micro_steps * (weights_moved + activations_moved)
    step_s = predict(config, spec, mfu=mfu)["time"]["step_s"]
    step_s = step_s and step_s / n_gpus
    available = memory_bytes or spec.memory_bytes
    peak = sum(held.values())
    return {
        "n_gpus": n_gpus, "replicas": replicas, "gpus_per_sequence": share, "batch_size": micro_batch,
        "micro_steps": micro_steps, "memory": held, "peak": peak, "available": available,
        "fits": peak <= available if available else None,
        "moved_bytes": moved, "step_s": step_s, "bandwidth_to_hide": step_s and moved / step_s,
    }  # fmt: skip


def largest_unit(s):
    """Return the number of parameters in the largest unit that is gathered at once: a block, or a single table."""
    blocks = [sum(p.numel for name, p in s.params.items() if name.startswith(f"blocks.{i}.")) for i in range(2)]
    return max(*blocks, *(p.numel for p in s.params.values()))


def most_activations(s):
    """Return the most bytes that are alive at once of what is not sharded."""
    t = Timeline(s)
    not_sharded = [b for b in t.first if t.category(b) not in SHARDED]
    persistent = sum(b.bytes for b in s.persistent if b.kind not in ("param", "state"))
    return max(t.bytes_over_time(not_sharded, persistent))


def smallest_cluster(config, spec, memory_bytes, most=4096):
    """Return on_cluster() for the least power of two of GPUs on which the config fits; None if there is none.

    If the config fits on no such number of GPUs, the same is tried with recompute="block".
    """
    sequences = config.batch_size * config.gradient_accumulation_steps
    for recompute in dict.fromkeys((config.recompute, "block")):
        n_gpus = 2
        while n_gpus <= min(most, sequences):
            if sequences % n_gpus == 0:
                found = on_cluster(replace(config, recompute=recompute), spec, n_gpus, memory_bytes)
                if found["fits"]:
                    return found | {"recompute": recompute}
            n_gpus *= 2
    return None


def cluster_times(time, result):
    """Return the times of a prediction for one GPU as those of the cluster."""
    n = result["n_gpus"]
    faster = {key: time[key] and time[key] / n for key in ("step_s", "least_s", "total_s", "days")}
    return time | faster | {"tokens_per_s": time["tokens_per_s"] and time["tokens_per_s"] * n}


def report(config, spec, prediction):
    """Yield the prediction for a run on many GPUs, line by line: what each of them holds comes first."""
    r = prediction["cluster"]
    yield fits_line(r["fits"], False, r["peak"], r["available"], f"at the peak on each of {r['n_gpus']:,} GPUs")
    yield from time_lines(config, prediction["time"])
    yield from run_lines(config, spec, prediction)
    shared = f", {r['gpus_per_sequence']} to a sequence" if r["gpus_per_sequence"] > 1 else ""
    own = f"each with a micro-batch of {r['batch_size']} and {r['micro_steps']:,} micro-steps"
    yield f"GPUs        {r['n_gpus']:,} x {spec.name}: {r['replicas']:,} replicas{shared}, {own}"
    yield "            everything is sharded (ZeRO-3); this is arithmetic, which no run of this version has checked"
    notes = {
        "states": "weights, gradients and moments, 1/n of them",
        "gathered": "the weights of two blocks, the gradients of one",
        "activations": "and logits, of its own micro-batch",
    }
    yield "memory      of each GPU"
    yield from (f"  {name:<17}{mib(n):>12}  {notes[name]}" for name, n in r["memory"].items())
    yield f"  {'peak':<17}{mib(r['peak']):>12}  the sum"
    hidden = f", hidden if links carry {r['bandwidth_to_hide'] / 1e9:,.1f} GB/s" if r["bandwidth_to_hide"] else ""
    yield f"  {'sent and received':<17}{mib(r['moved_bytes']):>12}  by each GPU in a step{hidden}"


def refuse_what_cannot_fit(spec, prediction):
    """Raise DoesNotFit if the peak on each GPU is larger than its memory."""
    r = prediction["cluster"]
    if r["fits"] is False:
        raise DoesNotFit(f"{mib(r['peak'])} on each of {r['n_gpus']:,} GPUs, but {spec.name} has {mib(r['available'])}")
