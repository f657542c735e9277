"""What fits into the memory of a device: the largest batch, and the changes that make a config fit."""

import bisect
import math
from dataclasses import replace

from cli.errors import DoesNotFit, require
from cli.units import duration, mib
from estimate import cluster
from estimate.memory import Timeline
from estimate.predict import predict
from estimate.step import training_step
from estimate.step_time import ASSUMED_MFU
from ops.choices import attention_kind, auto_loss_chunk, tile_size


class PeakByBatch:
    """The peak of a config at any batch_size, from the operations of two steps.

    Each buffer either has the batch as a factor or does not depend on it. So during each operation, fixed + slope x
    batch_size bytes are alive. This holds from the least batch that fills a tile of attention and consists of whole
    chunks of the loss. A larger batch whose last chunk is smaller needs less than that. The peak of a batch below the
    least one is found from a step with that batch.
    """

    def __init__(self, config, spec):
        self.config, self.spec, self.least = config, spec, 1
        if attention_kind(config.dtype, spec.kind, False, config.attn_dropout) == "tiled attention":
            _, heads = tile_size(config.n_head // config.n_kv_head, config.block_size)
            self.least = -(-heads // config.n_kv_head)
        if config.loss_chunk:
            of_whole_chunks = config.loss_chunk // math.gcd(config.loss_chunk, config.block_size)
            self.least = -(-self.least // of_whole_chunks) * of_whole_chunks
        one, two = (self.timeline(batch_size).live for batch_size in (self.least, 2 * self.least))
        self.lines = {(2 * a - b, (b - a) // self.least) for a, b in zip(one, two, strict=True)}  # (fixed, slope)

    def timeline(self, batch_size):
        return Timeline(training_step(replace(self.config, batch_size=batch_size), self.spec))

    def at(self, batch_size):
        if batch_size < self.least:
            return self.timeline(batch_size).peak
        return max(fixed + slope * batch_size for fixed, slope in self.lines)

    def largest(self, memory_bytes):
        """Return the largest batch_size whose peak is within memory_bytes; 0 if not even 1 is."""
        # No slope is 0, because the batch itself is always alive.
        largest = min((memory_bytes - fixed) // slope for fixed, slope in self.lines)
        if largest >= self.least:
            return largest
        return bisect.bisect_right(range(1, self.least), memory_bytes, key=self.at)


def largest_batch(config, spec, memory_bytes):
    """Return the largest batch_size that fits into memory_bytes; 0 if not even 1 does."""
    return PeakByBatch(config, spec).largest(memory_bytes)


def usable_memory(spec, memory_bytes):
    """Return the bytes that may be used: the given ones, or those of the device."""
    require(memory_bytes or spec.memory_bytes, f"{spec.name}: its memory is unknown; give --memory")
    return memory_bytes or spec.memory_bytes


def refit(config, spec, memory_bytes):
    """Return the config with smaller micro-batches that fit, and more of them; None if not even one sequence fits.

    The tokens per step stay as close as possible. Of the batch sizes in the upper half of those that fit, the ones that
    divide the sequences of a step come first, then the larger ones.
    """
    if PeakByBatch(config, spec).at(config.batch_size) <= memory_bytes:
        return config
    accumulating = replace(config, gradient_accumulation_steps=max(2, config.gradient_accumulation_steps))
    largest = PeakByBatch(accumulating, spec).largest(memory_bytes)
    if not largest:
        return None
    sequences = config.batch_size * config.gradient_accumulation_steps
    sizes = range((largest + 1) // 2, largest + 1)
    size = min(sizes, key=lambda b: (abs(round(sequences / b) * b - sequences), -b))
    return replace(config, batch_size=size, gradient_accumulation_steps=round(sequences / size))


def shorter(config, spec, memory_bytes):
    """Return the config with block_size halved until it fits; None if that does not help.

    A context that fits with the same batch_size comes first.
    """
    fitting, block_size = [], config.block_size
    while block_size >= (config.mlp_context if config.model == "mlp" else 1):
        accumulation = max(1, round(config.tokens_per_step / (config.batch_size * block_size)))
        short = replace(config, block_size=block_size, gradient_accumulation_steps=accumulation)
        fitting += filter(None, [refit(short, spec, memory_bytes)])
        block_size //= 2
    best = next((c for c in fitting if c.batch_size == config.batch_size), fitting[0] if fitting else config)
    return best if best.block_size < config.block_size else None


def remedies(config, spec, memory_bytes=None, mfu=ASSUMED_MFU):
    """Return the changes that make a resolved config fit, the best first, each with its memory and its cost.

    The changes are those that this trainer can make: smaller micro-batches, a loss in chunks, recomputation, half
    precision, a shorter context. Sharding is a separate entry, because it is only calculated. Changes that keep the
    context come first, then those that take the least time per token. The ratios are per token, relative to the config.
    If the config fits, there are no remedies.
    """
    memory_bytes = usable_memory(spec, memory_bytes)
    before = predict(config, spec, memory_bytes, mfu)
    states = sum(before["memory"][key] for key in ("params", "gradients", "optimizer"))
    found = []
    if not before["fits"] and states <= memory_bytes:  # no remedy makes the states smaller
        for start in starting_points(config, spec):
            for change in (refit, shorter):
                variant = change(start, spec, memory_bytes)
                if variant is not None:
                    found.append(remedy(config, variant, before, predict(variant, spec, memory_bytes, mfu), spec))
    found.sort(key=lambda r: ("block_size" in r["changes"], r["time_ratio"] or r["flops_ratio"], r["peak"]))
    sharded = None if before["fits"] else cluster.smallest_cluster(config, spec, memory_bytes)
    return {"fits": before["fits"], "peak": before["memory"]["peak"], "available": memory_bytes, "states": states,
            "sharded": sharded, "recompute": config.recompute,
            "remedies": found}  # fmt: skip


def starting_points(config, spec):
    """Return the config with and without half precision, with and without chunks, with and without recomputation."""
    half = spec.native_dtype
    dtypes = ("float32", half) if config.dtype == "float32" != half else (config.dtype,)
    # The loss is in chunks if the config asks for it, or if loss_chunk="auto" would choose chunks.
    auto_chunk = config.loss_chunk or auto_loss_chunk(config.tokens_per_micro_step, config.vocab_size)
    chunks, recompute = dict.fromkeys((config.loss_chunk, auto_chunk)), dict.fromkeys((config.recompute, "block"))
    return [replace(config, dtype=t, loss_chunk=n, recompute=r) for t in dtypes for n in chunks for r in recompute]


def remedy(config, variant, before, after, spec):
    """Return what changes from a config to its variant, and what that costs; before and after are their predictions."""
    flops = after["flops"]["hardware_per_step"] / variant.tokens_per_step
    flops_ratio = flops * config.tokens_per_step / before["flops"]["hardware_per_step"]
    peaks = spec.peak(config.dtype), spec.peak(variant.dtype)
    return {
        "changes": {name: value for name, value in vars(variant).items() if value != getattr(config, name)},
        "peak": after["memory"]["peak"],
        "tokens_per_step": variant.tokens_per_step,
        "flops_ratio": flops_ratio,
        "time_ratio": flops_ratio * peaks[0] / peaks[1] if all(peaks) else None,
        "step_s": after["time"]["step_s"],
    }


def remedies_lines(result, spec):
    r, sharded = result, result["sharded"]
    if r["fits"]:
        yield "remedies    none is needed: it fits"
    elif r["states"] > r["available"]:
        states = f"parameters, gradients and optimizer state alone need {mib(r['states'])}, more than the card has"
        yield f"remedies    a smaller batch cannot help: {states}"
    elif r["remedies"]:
        yield "remedies    the best first; FLOPs and time are per token, relative to this config, at the same MFU"
    else:
        yield "remedies    none: no batch_size, precision or block_size makes this model fit"
    for remedy in r["remedies"]:
        time = f", {remedy['time_ratio']:.2f} x the time" if remedy["time_ratio"] else ""
        time += f" ({duration(remedy['step_s'])} a step)" if remedy["step_s"] else ""
        context = "; the context is shorter" if "block_size" in remedy["changes"] else ""
        yield "  " + " ".join(f"--{name}={value}" for name, value in remedy["changes"].items())
        yield (
            f"    {mib(remedy['peak'])} at the peak, {remedy['tokens_per_step']:,} tokens a step, "
            f"{remedy['flops_ratio']:.2f} x the FLOPs{time}{context}"
        )
    if sharded:
        again = f", with --recompute={sharded['recompute']}" if sharded["recompute"] != r["recompute"] else ""
        cards = f"sharded (ZeRO-3) over {sharded['n_gpus']} such cards{again}"
        yield f"  {cards}; this is only calculated, because this version trains on one card"
        moved = f"{mib(sharded['moved_bytes'])} sent and received by each card in a step"
        peak = f"{mib(sharded['peak'])} at the peak on each card"
        yield f"    {peak}, the same tokens a step, {moved}; --n_gpus shows more"


def refuse_what_cannot_fit(config, spec, prediction):
    """Raise DoesNotFit if the config does not fit. The message names the largest batch_size that fits, if one does."""
    if prediction["fits"] is not False:
        return
    memory = prediction["memory"]
    peak, available = memory["peak"], memory["available"]
    states = sum(memory[key] for key in ("params", "gradients", "optimizer"))
    largest, fitting = largest_batch(config, spec, available), refit(config, spec, available)
    if fitting:
        flags = f"--batch_size={fitting.batch_size} --gradient_accumulation_steps={fitting.gradient_accumulation_steps}"
        tokens = f"{fitting.tokens_per_step:,} tokens a step; this config has {config.tokens_per_step:,}"
        advice = f"{flags} fits, with {tokens}"
    elif largest:
        advice = "no batch_size fits together with gradient accumulation"
    elif states > available:
        advice = f"a smaller batch cannot help: parameters, gradients and optimizer state alone need {mib(states)}"
    else:
        advice = "not even --batch_size=1 fits; use a shorter --block_size or a smaller model"
    most = f"; --batch_size={largest} is the largest that fits" if largest else ""
    raise DoesNotFit(
        f"batch_size={config.batch_size} needs {mib(peak)} at its peak ({memory['peak_at']}), "
        f"but {spec.name} has {mib(available)}{most}; {advice}"
    )
