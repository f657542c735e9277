"""Questions on top of the prediction: what would fit, on which card, how long, how much, how to spend a budget best.

Each is a function that returns plain figures, with one beside it that yields them as lines to print.
"""

import functools
import math
from dataclasses import replace

import cluster
from config import Config, chunk_of, require, resolve
from hardware import ACCELERATORS
from prediction import ASSUMED_MFU, Peaks, predict, refit, step_flops
from schedule import schedule
from units import duration, mib, positive, si


def native_dtype(device):
    """Return the dtype that dtype="auto" becomes on a device."""
    return resolve(Config(vocab_size=1), device).dtype


def attained(device, mfu):
    """Return the FLOP/s of training on a device: the dense peak of its native dtype times the assumed MFU."""
    require(0 < mfu <= 1, f"mfu={mfu} must lie in (0, 1]")
    dtype = native_dtype(device)
    require(
        device.peak(dtype), f"{device.name}: its {dtype} peak is unknown, so no time can be told; name another card"
    )
    return device.peak(dtype) * mfu


def room(device, memory_bytes):
    """Return the bytes that may be used: those given, or the device's."""
    require(memory_bytes or device.memory_bytes, f"{device.name}: its memory is unknown; give --memory")
    return memory_bytes or device.memory_bytes


# --- on the back of a napkin


def napkin(params, tokens, device, n_gpus=1, mfu=ASSUMED_MFU, price_per_gpu_hour=None):
    """Return training FLOPs, seconds, days, GPU-hours and price of a run of which only the size is known.

    C = 6 N D: a parameter is multiplied and added once forward, twice backward (Kaplan et al. 2020). Time is C over
    what all GPUs attain together.
    """
    positive(params=params, tokens=tokens, n_gpus=n_gpus)
    flops = 6 * params * tokens
    seconds = flops / (n_gpus * attained(device, mfu))
    price, gpu_hours = price_per_gpu_hour, n_gpus * seconds / 3600
    if price is not None:
        positive(price_per_gpu_hour=price)
        price *= gpu_hours
    return {"flops": flops, "seconds": seconds, "days": seconds / 86400, "gpu_hours": gpu_hours, "price": price}


def napkin_lines(result, device, n_gpus, mfu):
    r = result
    gpu_hours = f"{r['gpu_hours']:,.0f}" if r["gpu_hours"] >= 100 else f"{r['gpu_hours']:.3g}"
    yield f"FLOPs       {r['flops']:.3g}: 6 x parameters x tokens, attention left out"
    yield (
        f"time        {duration(r['seconds'])}, {gpu_hours} GPU-hours on {n_gpus:,} x {device.name} in "
        f"{native_dtype(device)} at an assumed {mfu:.0%} of the peak"
    )
    if r["price"] is not None:
        yield f"price       {r['price']:,.2f}, in the currency of the price per GPU-hour"


def max_params(device, n_gpus=1, bytes_per_param=16, memory_bytes=None):
    """Return how many parameters have room, activations left out: the memory of all GPUs over bytes per parameter.

    16 bytes are float32 weights, gradients and Adam's two moments, 4 each.
    """
    positive(n_gpus=n_gpus, bytes_per_param=bytes_per_param)
    return int(n_gpus * room(device, memory_bytes) // bytes_per_param)


def max_params_lines(n_params, bytes_per_param):
    yield f"parameters  {si(n_params)} at most: {bytes_per_param:g} bytes each, evenly sharded, no activations"


# --- what fits


def shorter(config, device, memory_bytes):
    """Return the config with block_size halved until it fits, at its own batch_size if possible; None if of no help."""
    fitting, size = [], config.block_size
    while size >= (config.mlp_context if config.model == "mlp" else 1):
        accumulation = max(1, round(config.tokens_per_step / (config.batch_size * size)))
        short = replace(config, block_size=size, gradient_accumulation_steps=accumulation)
        fitting += filter(None, [refit(short, device, memory_bytes)])
        size //= 2
    best = next((c for c in fitting if c.batch_size == config.batch_size), fitting[0] if fitting else config)
    return best if best.block_size < config.block_size else None


CHANGED = (
    "dtype",
    "loss_chunk",
    "recompute",
    "block_size",
    "batch_size",
    "gradient_accumulation_steps",
)  # by the remedies


def remedies(config, device, memory_bytes=None, mfu=ASSUMED_MFU):
    """Return what makes a resolved config fit, best first, each with its memory and its price; no remedy if it fits.

    The remedies are those this trainer has: smaller micro-batches, a loss in chunks, recomputation, half precision, a
    shorter context; sharding stands apart, as arithmetic. First come those
    that keep the context, then those that take the least time per token. The ratios are per token, to the config's own.
    """
    memory_bytes = room(device, memory_bytes)
    before = predict(config, device, memory_bytes, mfu)
    states = sum(before["memory"][key] for key in ("params", "gradients", "optimizer"))
    half, found = native_dtype(device), []
    dtypes = ("float32", half) if config.dtype == "float32" != half else (config.dtype,)
    if before["fits"] or states > memory_bytes:  # no remedy is needed, or none reaches the states
        dtypes = ()
    # in chunks or not, as asked for; and as "auto" has it, where that is in chunks
    chunks = {config.loss_chunk, config.loss_chunk or chunk_of(config.tokens_per_micro_step, config.vocab_size)}
    again = {config.recompute, "block"}
    starts = [replace(config, dtype=t, loss_chunk=n, recompute=r) for t in dtypes for n in chunks for r in again]
    for variant in (way(start, device, memory_bytes) for start in starts for way in (refit, shorter)):
        if variant is None:
            continue
        after = predict(variant, device, memory_bytes, mfu)
        flops = after["flops"]["hardware_per_step"] / variant.tokens_per_step
        flops_ratio = flops * config.tokens_per_step / before["flops"]["hardware_per_step"]
        peaks = device.peak(config.dtype), device.peak(variant.dtype)
        time_ratio = flops_ratio * peaks[0] / peaks[1] if all(peaks) else None
        changes = {n: getattr(variant, n) for n in CHANGED if getattr(variant, n) != getattr(config, n)}
        found.append({"changes": changes, "peak": after["memory"]["peak"], "tokens_per_step": variant.tokens_per_step,
                      "flops_ratio": flops_ratio, "time_ratio": time_ratio,
                      "step_s": after["time"]["step_s"]})  # fmt: skip
    found.sort(key=lambda r: ("block_size" in r["changes"], r["time_ratio"] or r["flops_ratio"]))
    sharded = None if before["fits"] else cluster.fewest(config, device, memory_bytes)
    return {"fits": before["fits"], "peak": before["memory"]["peak"], "available": memory_bytes, "states": states,
            "sharded": sharded, "recompute": config.recompute,
            "remedies": found}  # fmt: skip


def remedies_lines(result, device):
    r, sharded = result, result["sharded"]
    yield f"memory      {mib(r['peak'])} at the peak, of {mib(r['available'])} on {device.name}"
    if r["fits"]:
        yield "remedies    none is needed: it fits"
    elif r["states"] > r["available"]:
        yield f"remedies    batch size cannot help: the states alone need more than the card, {mib(r['states'])}"
    elif r["remedies"]:
        yield "remedies    best first; FLOPs and time per token, to the config's own at the same MFU"
    else:
        yield "remedies    none: no batch_size, precision or block_size makes this model fit"
    for remedy in r["remedies"]:
        time = f", {remedy['time_ratio']:.2f} x the time" if remedy["time_ratio"] else ""
        time += f" ({duration(remedy['step_s'])} a step)" if remedy["step_s"] else ""
        context = "; sees less context" if "block_size" in remedy["changes"] else ""
        yield "  " + " ".join(f"--{name}={value}" for name, value in remedy["changes"].items())
        yield (
            f"    {mib(remedy['peak'])} at the peak, {remedy['tokens_per_step']:,} tokens a step, "
            f"{remedy['flops_ratio']:.2f} x the FLOPs{time}{context}"
        )
    if sharded:
        moved = f"{mib(sharded['moved_bytes'])} moved by each a step"
        again = f", with --recompute={sharded['recompute']}" if sharded["recompute"] != r["recompute"] else ""
        cards = f"sharded (ZeRO-3) over {sharded['n_gpus']} such cards"
        yield f"  {cards}{again}, as arithmetic: this version trains on one"
        yield f"    {mib(sharded['peak'])} on each at its peak, the same tokens a step, {moved}; --n_gpus says more"


def compare_cards(config, mfu=ASSUMED_MFU):
    """Return a row for every accelerator of the table: does the config fit, the largest batch_size, time; best first.

    dtype is resolved per card; one that lacks the config's takes what "auto" is there. The schedule depends on the kind
    of device and on dtype only, so it is written down once for each pair.
    """
    require(0 < mfu <= 1, f"mfu={mfu} must lie in (0, 1]")
    rows, known = [], {}
    for name, device in ACCELERATORS.items():
        lacking = config.dtype != "auto" and not device.has_matmul(config.dtype)
        c = resolve(replace(config, dtype="auto") if lacking else config, device)
        pair = (device.kind, c.dtype)
        if pair not in known:
            known[pair] = step_flops(schedule(c, device))["per_step"], Peaks(c, device)
        (flops, peaks), memory, peak = known[pair], device.memory_bytes, device.peak(c.dtype)
        step_s = flops / (peak * mfu) if peak else None
        fits = peaks.at(c.batch_size) <= memory if memory else None
        rows.append({"name": name, "dtype": c.dtype, "memory_bytes": memory, "fits": fits,
                     "largest_batch": peaks.largest(memory) if memory else None,
                     "step_s": step_s, "days": step_s * c.max_iters / 86400 if peak else None})  # fmt: skip
    order = {True: 0, None: 1, False: 2}
    return sorted(rows, key=lambda r: (order[r["fits"]], r["largest_batch"] == 0, r["step_s"] or math.inf))


def compare_cards_lines(rows, mfu):
    def known(value, show):
        return "n/a" if value is None else show(value)

    yield f"{'card':<16}{'dtype':<10}{'memory':>8}{'fits':>6}{'largest batch_size':>20}{'a step':>12}{'the run':>17}"
    for r in rows:
        memory, largest = known(r["memory_bytes"], lambda n: f"{n / 1e9:.0f} GB"), known(r["largest_batch"], str)
        fits = known(r["fits"], lambda yes: "yes" if yes else "no")
        step, run = known(r["step_s"], duration), known(r["days"], lambda days: duration(days * 86400))
        yield f"{r['name']:<16}{r['dtype']:<10}{memory:>8}{fits:>6}{largest:>20}{step:>12}{run:>17}"
    yield f"one card each, at an assumed {mfu:.0%} of its peak; TPUs as arithmetic, as this trainer has none"


# --- the best use of a budget

# Hoffmann et al. 2022 (Chinchilla), approaches 1 and 2: parameters and tokens grow alike, about 20 tokens a parameter.
# Not approach 3: its published fit disagrees with its own data, and refitted it gives 20 too (Besiroglu et al. 2024).
TOKENS_PER_PARAM = 20
USABLE = 0.95  # of a card's memory: an allowance for the driver's context and the allocator's fragmentation
BLOCK_SIZE, VOCAB_SIZE = 1024, 50304
ASPECT = 64  # n_embd / n_layer, as in GPT-2 124M; the loss hardly depends on it (Kaplan et al. 2020, section 3.1)
SHAPES = [(layers, width) for width in (*range(32, 512, 32), *range(512, 16385, 64)) for layers in range(1, 161)]


def compute_optimal(flops):
    """Return (parameters, tokens) for a budget: C = 6 N D and D = 20 N give N = sqrt(C / 120)."""
    n_params = math.sqrt(flops / (6 * TOKENS_PER_PARAM))
    return n_params, TOKENS_PER_PARAM * n_params


def gpt2_size(n_layer, n_embd):
    """Return (parameters, FLOPs per token, those outside the head) of a GPT-2-like model without biases.

    A block has 12 C^2 weights and two gains of C; the tied table V C; positions T C; the last norm C. A weight that is
    multiplied costs 6 FLOPs a token; a layer's scores and values, over T positions, 4 C T forward and 8 C T backward.
    """
    L, C, T, V = n_layer, n_embd, BLOCK_SIZE, VOCAB_SIZE
    blocks = 72 * L * C * C + 12 * L * C * T
    return L * (12 * C * C + 2 * C) + V * C + T * C + C, blocks + 6 * V * C, blocks


@functools.cache
def training_costs():
    """Return the FLOPs of training on 20 tokens a parameter, by (n_layer, n_embd)."""
    sizes = {shape: gpt2_size(*shape) for shape in SHAPES}
    return {shape: TOKENS_PER_PARAM * n_params * per_token for shape, (n_params, per_token, _) in sizes.items()}


def shape_for(flops):
    """Return (n_layer, n_embd) of the best-proportioned model whose training costs the budget within 4 %.

    4 % of the cost are 2 % of the parameters: cost grows with their square.
    """
    off = {shape: abs(cost / flops - 1) for shape, cost in training_costs().items()}
    near = [shape for shape in SHAPES if off[shape] <= 0.04] or [min(SHAPES, key=off.get)]
    return min(near, key=lambda shape: abs(math.log(shape[1] / shape[0] / ASPECT)))


def plan(device, hours, mfu=ASSUMED_MFU, memory_bytes=None):
    """Return the compute-optimal run of so many hours on a device: its figures, and its config as text.

    The law is for C = 6 N D; here the model is the one whose 20 tokens a parameter take the hours by our own count of
    FLOPs, attention included, so it is somewhat smaller. Where the card has no room for it, it is the largest that
    fits, trained for all the hours on more tokens. Batch and peak lr follow Bi et al. 2024 (DeepSeek LLM, section 3.1):
    0.2920 C^0.3271 tokens a step (here a power of two of sequences) and 0.3118 C^-0.1250, C without the head.
    """
    positive(hours=hours)
    flops, least = 3600 * hours * attained(device, mfu), training_costs()[SHAPES[0]]
    memory = memory_bytes or int(room(device, None) * USABLE)
    require(
        flops >= least,
        f"hours={hours:g} on {device.name}: {si(flops, 'FLOP')} are too few for a model of {VOCAB_SIZE:,} tokens; "
        f"the smallest takes {si(least, 'FLOP')}: plan for more hours",
    )
    budget, largest = min(flops, 160 * (memory / 16) ** 2), 0  # 160 N^2 > 120 N^2, with 16 N bytes all the memory
    while not largest:
        require(budget >= least / 2, f"{device.name}: {mib(memory)} have no room for a model of {VOCAB_SIZE:,} tokens")
        n_layer, n_embd = shape_for(budget)
        shape = {"n_layer": n_layer, "n_head": n_embd // (32 if n_embd % 64 else 64), "n_embd": n_embd}
        shape |= {"block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE}
        c = resolve(Config(**shape, gradient_accumulation_steps=2), device)
        largest, budget = Peaks(c, device).largest(memory), 0.9 * budget
    n_params, per_token, blocks = gpt2_size(n_layer, n_embd)
    fitted = max(1e17, flops * blocks / per_token)  # the smallest budget of their fit
    sequences = 2 ** round(math.log2(0.2920 * fitted**0.3271 / BLOCK_SIZE))
    batch = min(sequences, 1 << largest.bit_length() - 1)
    micro_steps, lr = sequences // batch, 0.3118 * fitted**-0.125
    p = predict(replace(c, batch_size=batch, gradient_accumulation_steps=micro_steps), device, memory, mfu)
    steps = int(3600 * hours / p["time"]["step_s"])
    tokens, (law_params, law_tokens) = steps * sequences * BLOCK_SIZE, compute_optimal(flops)
    eval_iters = max(1, min(200, 3 * steps * micro_steps // 1000))  # ten times a third of a micro-step: 1 % in all
    settings = shape | {
        "batch_size": batch, "gradient_accumulation_steps": micro_steps,
        "max_iters": steps, "lr_decay_iters": steps, "warmup_iters": steps // 50,
        "learning_rate": float(f"{lr:.2g}"), "min_lr": float(f"{lr / 10:.2g}"),
        "eval_interval": max(1, steps // 10), "eval_iters": eval_iters, "out_dir": "out-plan",
    }  # fmt: skip
    law = f"{TOKENS_PER_PARAM} tokens a parameter; with C = 6 N D, {si(law_params)} parameters on {si(law_tokens)}"
    limit = "; the card has no room for more" if training_costs()[n_layer, n_embd] < 0.9 * flops else ""
    text = f"""The compute-optimal GPT-2-like model of {hours:g} h.

hardware    one {device.name}, {mib(p["memory"]["peak"])} at the peak
duration    predicted: {duration(p["time"]["step_s"] * steps)} at {mfu:.0%} MFU; evaluations come on top
law         Hoffmann et al. 2022, approaches 1 and 2: {law}
size        {si(n_params)} parameters, {si(tokens)} tokens: {tokens / n_params:.1f} a parameter{limit}
"""
    text = f'"""{text}"""\n\n' + "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    return {"flops": flops, "params": n_params, "tokens": tokens, "config": text}


def plan_lines(result):
    yield from result["config"].splitlines()  # a config file, whose docstring says the rest


# --- what a change would do

COMPARED = {
    "parameters": ("model", "params", si),
    "FLOPs a token": ("flops", "per_token", si),
    "FLOPs a step": ("flops", "per_step", si),
    **{f"{key.replace('_', ' ')}, bytes": ("memory", key, mib)
       for key in ("params", "gradients", "optimizer", "activations", "weight_copies", "loss", "batch", "peak")},
    "a step": ("time", "step_s", duration),
    "the run": ("time", "total_s", duration),
}  # fmt: skip


def compare(config_a, config_b, device, memory_bytes=None, mfu=ASSUMED_MFU):
    """Return the settings in which two resolved configs differ, and figures: (first, second, difference) by name."""
    a, b = (predict(config, device, memory_bytes, mfu) for config in (config_a, config_b))
    pairs = {name: (getattr(config_a, name), getattr(config_b, name)) for name in vars(config_a)}
    figures = {name: (a[group][key], b[group][key]) for name, (group, key, _) in COMPARED.items()}
    return {
        "settings": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "figures": {name: (x, y, None if x is None else y - x) for name, (x, y) in figures.items()},
    }


def compare_lines(result):
    for name, (a, b) in result["settings"].items():
        yield f"{name}: {a!r} -> {b!r}"
    yield f"{'':<22}{'first':>14}{'second':>14}{'difference':>14}"
    for name, (a, b, difference) in result["figures"].items():
        if difference is None:
            yield f"{name:<22}{'n/a':>14}{'n/a':>14}"
            continue
        show, sign = COMPARED[name][-1], "+" if difference > 0 else "-"
        change = f"{difference / a:>+9.1%}" if a and difference else ""
        yield f"{name:<22}{show(a):>14}{show(b):>14}{sign + show(abs(difference)) if difference else 0:>14}{change}"
