"""Budgets: the time and price of a run from its size alone, and the best run for a number of hours."""

import functools
import math
from dataclasses import replace

from cli.errors import require
from cli.units import duration, mib, positive, si
from config import Config, resolve
from estimate.fit import PeakByBatch, usable_memory
from estimate.predict import predict
from estimate.step_time import ASSUMED_BAND, ASSUMED_MFU

# In approaches 1 and 2 of Hoffmann et al. 2022 (Chinchilla), the parameters and the tokens of the best model grow in
# proportion, with about 20 tokens per parameter. Approach 3 is not used: its published fit disagrees with its own data,
# and a corrected fit also gives about 20 (Besiroglu et al. 2024).
TOKENS_PER_PARAM = 20
USABLE = 0.95  # fraction of a card's memory; the rest is for the driver's context and the allocator's fragmentation
BLOCK_SIZE, VOCAB_SIZE = 1024, 50304
ASPECT = 64  # n_embd / n_layer, as in GPT-2 124M; the loss hardly depends on it (Kaplan et al. 2020, section 3.1)
SHAPES = [(layers, width) for width in (*range(32, 512, 32), *range(512, 16385, 64)) for layers in range(1, 161)]


# --- the time and price of a run from its size alone


def attained(spec, mfu):
    """Return the FLOP/s of training on a device: the dense peak of its native dtype times the assumed MFU."""
    require(0 < mfu <= 1, f"mfu={mfu} must lie in (0, 1]")
    dtype = spec.native_dtype
    unknown = f"{spec.name}: its {dtype} peak is unknown, so no time can be predicted; name another card"
    require(spec.peak(dtype), unknown)
    return spec.peak(dtype) * mfu


def napkin(params, tokens, spec, n_gpus=1, mfu=ASSUMED_MFU, price_per_gpu_hour=None):
    """Return the training FLOPs, seconds, days, GPU-hours and price of a run with this many parameters and tokens.

    C = 6 N D: each parameter is multiplied and added once in forward and twice in backward (Kaplan et al. 2020). The
    time is C over the FLOP/s that all GPUs attain together.
    """
    positive(params=params, tokens=tokens, n_gpus=n_gpus)
    flops = 6 * params * tokens
    seconds = flops / (n_gpus * attained(spec, mfu))
    price, gpu_hours = price_per_gpu_hour, n_gpus * seconds / 3600
    if price is not None:
        positive(price_per_gpu_hour=price)
        price *= gpu_hours
    return {"flops": flops, "seconds": seconds, "days": seconds / 86400, "gpu_hours": gpu_hours, "price": price}


def napkin_lines(result, spec, n_gpus, mfu):
    r = result
    gpu_hours = f"{r['gpu_hours']:,.0f}" if r["gpu_hours"] >= 100 else f"{r['gpu_hours']:.3g}"
    yield f"FLOPs       {r['flops']:.3g}: 6ND = 6 x parameters x tokens, attention is left out"
    yield (
        f"time        {duration(r['seconds'])}, {gpu_hours} GPU-hours on {n_gpus:,} x {spec.name} in "
        f"{spec.native_dtype}, give or take {ASSUMED_BAND:.0%}: an MFU of {mfu:.0%} is assumed"
    )
    if r["price"] is not None:
        yield f"price       {r['price']:,.2f}, in the currency of the price per GPU-hour"


def max_params(spec, n_gpus=1, bytes_per_param=16, memory_bytes=None):
    """Return how many parameters fit into the memory of all GPUs if it holds no activations.

    16 bytes per parameter are a float32 weight, its gradient and Adam's two moments, 4 bytes each.
    """
    positive(n_gpus=n_gpus, bytes_per_param=bytes_per_param)
    return int(n_gpus * usable_memory(spec, memory_bytes) // bytes_per_param)


def max_params_lines(n_params, bytes_per_param):
    yield f"parameters  {si(n_params)} at most: {bytes_per_param:g} bytes each, sharded evenly, without activations"


# --- the best run for a number of hours


def compute_optimal(flops):
    """Return (parameters, tokens) for a budget: C = 6 N D and D = 20 N give N = sqrt(C / 120)."""
    n_params = math.sqrt(flops / (6 * TOKENS_PER_PARAM))
    return n_params, TOKENS_PER_PARAM * n_params


def gpt2_size(n_layer, n_embd):
    """Return (parameters, FLOPs per token, FLOPs per token without the head) of a model like GPT-2 without biases.

    A block has 12 C^2 weights and two gains of C. The tied embedding has V C, the positions T C, and the last norm C.
    A weight in a matmul costs 6 FLOPs per token. The scores and values of a layer, over T positions, cost 4 C T in
    forward and 8 C T in backward.
    """
    L, C, T, V = n_layer, n_embd, BLOCK_SIZE, VOCAB_SIZE
    blocks = 72 * L * C * C + 12 * L * C * T
    return L * (12 * C * C + 2 * C) + V * C + T * C + C, blocks + 6 * V * C, blocks


@functools.cache
def training_costs():
    """Return {(n_layer, n_embd): FLOPs of training on 20 tokens per parameter}."""
    sizes = {shape: gpt2_size(*shape) for shape in SHAPES}
    return {shape: TOKENS_PER_PARAM * n_params * per_token for shape, (n_params, per_token, _) in sizes.items()}


def shape_for(flops):
    """Return (n_layer, n_embd) of a model whose training costs the budget within 4 %.

    Of such models, it is the one whose n_embd / n_layer is nearest to ASPECT. 4 % of the cost are 2 % of the
    parameters, because the cost grows with their square.
    """
    off = {shape: abs(cost / flops - 1) for shape, cost in training_costs().items()}
    near = [shape for shape in SHAPES if off[shape] <= 0.04] or [min(SHAPES, key=off.get)]
    return min(near, key=lambda shape: abs(math.log(shape[1] / shape[0] / ASPECT)))


def largest_that_fits(flops, spec, memory):
    """Return (config, largest batch_size) of the model that costs the budget, or of the largest one that fits.

    If states of 16 bytes per parameter fill the memory, there are N = memory / 16 parameters. To train them on 20 N
    tokens takes 120 N^2 FLOPs without attention, and less than 160 N^2 with it, so the search starts there.
    """
    budget = min(flops, 160 * (memory / 16) ** 2)
    smallest = training_costs()[SHAPES[0]]
    while True:
        too_small = f"{spec.name}: {mib(memory)} of memory is too little for a vocabulary of {VOCAB_SIZE:,} tokens"
        require(budget >= smallest / 2, too_small)
        n_layer, n_embd = shape_for(budget)
        n_head = n_embd // (32 if n_embd % 64 else 64)
        shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        config = Config(**shape, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, gradient_accumulation_steps=2)
        config = resolve(config, spec)
        batch_size = PeakByBatch(config, spec).largest(memory)
        if batch_size:
            return config, batch_size
        budget *= 0.9


def plan(spec, hours, mfu=ASSUMED_MFU, memory_bytes=None):
    """Return the compute-optimal run for a number of hours on a device: its figures, and its config as text.

    The law is stated for C = 6 N D. This plan takes the model whose 20 tokens per parameter fill the hours by the exact
    count of FLOPs, which includes attention, so the model is somewhat smaller. If that does not fit into the memory,
    the plan takes the largest model that fits, and trains it on more tokens for all the hours.

    The global batch and the peak learning rate follow Bi et al. 2024 (DeepSeek LLM, section 3.1): 0.2920 C^0.3271
    tokens per step, here rounded to a power of two of sequences, and 0.3118 C^-0.1250, where C excludes the head.
    """
    positive(hours=hours)
    flops, smallest = 3600 * hours * attained(spec, mfu), training_costs()[SHAPES[0]]
    memory = memory_bytes or int(usable_memory(spec, None) * USABLE)
    require(
        flops >= smallest,
        f"hours={hours:g} on {spec.name}: {si(flops, 'FLOP')} are too few for a vocabulary of {VOCAB_SIZE:,} tokens; "
        f"the smallest model takes {si(smallest, 'FLOP')}: plan for more hours",
    )
    config, largest_batch = largest_that_fits(flops, spec, memory)
    n_params, per_token, without_head = gpt2_size(config.n_layer, config.n_embd)
    fitted = max(1e17, flops * without_head / per_token)  # 1e17 is the smallest budget of the published fit
    sequences = 2 ** round(math.log2(0.2920 * fitted**0.3271 / BLOCK_SIZE))
    batch = min(sequences, 1 << largest_batch.bit_length() - 1)
    micro_steps, lr = sequences // batch, 0.3118 * fitted**-0.125
    p = predict(replace(config, batch_size=batch, gradient_accumulation_steps=micro_steps), spec, memory, mfu)
    steps = int(3600 * hours / p["time"]["step_s"])
    # Ten evaluations take 1 % of the time in all; a batch of validation takes a third of a micro-step.
    eval_iters = max(1, min(200, 3 * steps * micro_steps // 1000))
    settings = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    settings |= {
        "batch_size": batch, "gradient_accumulation_steps": micro_steps,
        "max_iters": steps, "lr_decay_iters": steps, "warmup_iters": steps // 50,
        "learning_rate": float(f"{lr:.2g}"), "min_lr": float(f"{lr / 10:.2g}"),
        "eval_interval": max(1, steps // 10), "eval_iters": eval_iters, "out_dir": "out-plan",
    }  # fmt: skip
    tokens = steps * sequences * BLOCK_SIZE
    text = plan_text(spec, hours, mfu, p, steps, flops, config)
    text = f'"""{text}"""\n\n' + "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    return {"flops": flops, "params": n_params, "tokens": tokens, "config": text}


def plan_text(spec, hours, mfu, prediction, steps, flops, config):
    """Return the docstring of the planned config."""
    n_params, tokens = prediction["model"]["params"], steps * prediction["flops"]["tokens_per_step"]
    law_params, law_tokens = compute_optimal(flops)
    is_limited = training_costs()[config.n_layer, config.n_embd] < 0.9 * flops
    limit = "; the card has no room for a larger model" if is_limited else ""
    return f"""The compute-optimal GPT-2-like model of {hours:g} h.

hardware    one {spec.name}, {mib(prediction["memory"]["peak"])} at the peak
duration    predicted: {duration(prediction["time"]["step_s"] * steps)} at {mfu:.0%} MFU, without evaluations
            give or take {ASSUMED_BAND:.0%}: the MFU is assumed
law         Hoffmann et al. 2022, approaches 1 and 2: {TOKENS_PER_PARAM} tokens per parameter
            with C = 6 N D, the best model has {si(law_params)} parameters and sees {si(law_tokens)} tokens
size        {si(n_params)} parameters, {si(tokens)} tokens: {tokens / n_params:.1f} per parameter{limit}
"""


def plan_lines(result):
    yield from result["config"].splitlines()  # a config file, whose docstring explains the plan
