"""The report that accounting.py and train.py print before a run.

Its first three lines say whether the run fits, how long it takes, and at what MFU.
"""

from cli.units import duration, mib, si
from estimate.memory import Timeline

BASIS = {  # what a time is based on, in words
    "timed": "the sum of its operations, each timed here",
    "estimated": "estimated from other operations timed here",
    "assumed": "the MFU is assumed",
    "given": "the MFU is the one given",
}


def report(config, spec, prediction):
    """Yield the prediction for one device, line by line."""
    memory = prediction["memory"]
    yield fits_line(prediction["fits"], prediction["tight"], memory["peak"], memory["available"], "at the peak")
    yield from time_lines(config, prediction["time"])
    yield from run_lines(config, spec, prediction)
    yield from memory_lines(config, spec, memory)


def fits_line(fits, tight, peak, available, where):
    answer = "barely" if tight else {True: "yes", False: "no", None: "unknown"}[fits]
    room = f", of {mib(available)}" if available else "; the device's memory is not known (--memory gives it)"
    more = "; what the device needs besides, estimated below, may be too much" if tight else ""
    return f"fits        {answer}: {mib(peak)} {where}{room}{more}"


def time_lines(config, time):
    if time["step_s"] is None:
        yield "time        unknown without the device's peak: name a card with --gpu, or train here to measure it"
        yield "MFU         unknown"
        return
    yield (
        f"time        {duration(time['total_s'])} in all, {duration(time['step_s'])} a step ({band(time)}), "
        f"{time['tokens_per_s']:,.0f} tokens/s"
    )
    source = {"assumed": ", assumed (--mfu sets it),", "given": " (--mfu)"}.get(time["basis"], "")
    peak = f"{si(time['peak_flops'], 'FLOP/s')} in {config.dtype} ({time['peak_source']})"
    yield f"MFU         {time['mfu']:.0%}{source} of {peak}"


def band(time):
    """Return between which bounds a step's time is expected, and why they are no closer."""
    least, most = (duration(time["step_s"] * (1 + sign * time["band"])) for sign in (-1, 1))
    return f"{least} to {most}: {BASIS[time['basis']]}"


def run_lines(config, spec, prediction):
    """Yield what is trained, on what, and what that takes in FLOPs."""
    c, (model, flops, time) = config, (prediction[key] for key in ("model", "flops", "time"))
    shape = f"{c.n_layer} layers, width {c.n_embd}"
    if c.model == "transformer":
        groups = f" ({c.n_kv_head} key-value)" if c.n_kv_head != c.n_head else ""
        shape += f", {c.n_head} heads of {c.head_dim}{groups}"
    yield f"device      {spec.name}"
    yield f"model       {c.model}, {shape}, context {c.block_size}, vocabulary {c.vocab_size:,}"
    matmuls = f"of which {model['params_matmul']:,} are in matmuls (the rest are lookups and gains)"
    yield f"parameters  N = {model['params']:,}, {matmuls}"
    yield (
        f"batch       {c.batch_size} (sequences) x {c.block_size} (tokens) x {c.gradient_accumulation_steps} "
        f"(micro-steps) = {c.tokens_per_step:,} tokens a step"
    )
    yield f"run         {c.max_iters:,} steps, D = {si(c.tokens_per_step * c.max_iters)} tokens"
    six_nd = flops["six_nd_per_step"]
    for name, title, note in (
        ("six_nd_per_step", "FLOPs       6ND:   ", "attention left out"),
        ("per_step", "            exact: ", "all matmuls, attention in full, as PaLM counts it"),
        ("causal_per_step", "            causal:", "attention without the half that the mask hides"),
        ("hardware_per_step", "            run:   ", f"with what recompute={c.recompute!r} computes twice"),
    ):
        n = flops[name]
        if name != "hardware_per_step" or n > flops["per_step"]:
            ratio = "" if name == "six_nd_per_step" else f"{n / six_nd:.2f} x 6ND, "
            yield f"{title} {si(n, 'FLOP')} a step, {si(n * c.max_iters, 'FLOP')} in all ({ratio}{note})"
    if time["least_s"]:
        yield (
            f"roofline    {duration(time['least_s'])} a step, with each operation alone at the peak or the bandwidth, "
            "none fused, nothing cached"
        )


def memory_lines(config, spec, memory):
    """Yield what is allocated, and what is alive at the peak."""
    rows = [
        ("parameters", memory["params"], "float32"),
        ("gradients", memory["gradients"], "float32, complete at the end of backward"),
        ("optimizer state", memory["optimizer"], "two float32 moments"),
        ("activations", memory["activations"], "saved for backward, excluding the two rows below"),
        ("weight copies", memory["weight_copies"], f"in {config.dtype}, kept by autocast from forward to backward"),
        ("logits and loss", memory["loss"], "the most that is alive of them at once"),
    ]
    yield "memory      the parts are not all alive at once, so the peak is less than their sum"
    yield from (f"  {name:<17}{mib(n):>12}  {note}" for name, n, note in rows if n)
    yield f"  {'peak':<17}{mib(memory['peak']):>12}  in {memory['peak_at']}; alive at that moment:"
    alive = sorted(memory["at_peak"].items(), key=lambda item: -item[1])
    yield from (f"    {name:<25}{mib(n):>12}" for name, n in alive if n >= 0.005 * memory["peak"])
    if memory["available"] == spec.memory_bytes and spec.leaves_context:
        total = f"{mib(spec.total_bytes)}, the total that CUDA reports, less the least that its context takes"
        yield f"  {'available':<17}{mib(memory['available']):>12}  {total}"
    if memory["card"]:
        yield "  other memory of the GPU, which torch does not count (estimated):"
        for name, (least, most) in ((name, pair) for name, pair in memory["card"].items() if pair[1]):
            yield f"    {name:<25}{mib(least):>12}{f' to {mib(most)}' if most > least else ''}"
    if memory["pinned_host"]:
        yield f"  {'pinned host memory':<27}{mib(memory['pinned_host']):>12}  two batches on their way to the GPU"


def timeline(s, width=40):
    """Yield the bytes alive over a step as bars, a row per layer and phase, the most of each."""
    t = Timeline(s)
    rows = []  # [name, most bytes alive, whether the peak is there]
    for op, live in zip(s.ops, t.live, strict=True):
        place = op.group if op.layer is None else f"layer {op.layer}"
        if op.repeat > 1 and op.layer is not None:
            place = f"layers {op.layer} to {op.layer + op.repeat - 1}"
        name = op.phase if op.phase == place else f"{op.phase} {place}"
        again = f", {op.times // op.repeat} times" if op.times > op.repeat else ""
        if not rows or rows[-1][0] != name + again:
            rows.append([name + again, 0, False])
        rows[-1][1] = max(rows[-1][1], live)
        rows[-1][2] |= op is t.peak_op
    yield f"timeline    the most that is alive in each part of a step, {mib(t.persistent_bytes)} of it always"
    for name, most, at_peak in rows:
        mark = f"  peak: {t.peak_op.name}" if at_peak else ""
        yield f"  {name:<28}{mib(most):>12}  {'#' * round(width * most / t.peak)}{mark}"
