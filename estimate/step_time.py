"""The time of a step: the sum of its timed operations, or its FLOPs over an assumed fraction of the peak."""

import itertools
import math

ASSUMED_MFU = 0.4  # of a step that nobody has measured: what a well-tuned trainer reaches on one GPU
# From this many timed operations of various kinds and sizes, the times of other operations can be estimated well.
MANY_OPERATIONS = 20
# How far a measured step time may be from the predicted one, as a fraction: if all operations were timed here, if some
# are estimated from others, and if the MFU is assumed.
TIMED_BAND, ESTIMATED_BAND, ASSUMED_BAND = 0.15, 0.25, 0.5
CALL_SECONDS = 5e-6  # to call an operation


def estimated_band(spec):
    """Return the band of a step time that is estimated from the operations timed on the device."""
    n_timed = sum(len(times) for times in spec.op_times.values())
    return ESTIMATED_BAND if n_timed >= MANY_OPERATIONS else ASSUMED_BAND


def step_time(s, flops, mfu=None):
    """Return the seconds of a step and of the run, and what they are based on; None for what is not known.

    If operations were timed on the device and no MFU is given, their times are added up. On a CPU, the time that a core
    takes longer to read what another core wrote is added; an operation that is timed alone does not show it. Otherwise,
    the time is the FLOPs that the hardware executes over the peak times the MFU, which is the given one or ASSUMED_MFU.
    `band` is how far the measured time may be from the predicted one, as a fraction.
    """
    c, spec = s.config, s.spec
    peak, bandwidth = spec.peak(c.dtype), spec.bandwidth
    step_s = least_s = None
    basis, band = "given" if mfu else "assumed", ASSUMED_BAND
    if mfu is None and spec.op_times and peak and bandwidth:
        step_s, all_timed = sum_of_operations(s, peak, bandwidth)
        basis, band = ("timed", TIMED_BAND) if all_timed else ("estimated", estimated_band(spec))
        mfu = flops["per_step"] / (step_s * peak)
    elif peak:
        step_s = flops["hardware_per_step"] / (peak * (mfu or ASSUMED_MFU))
        mfu = flops["per_step"] / (step_s * peak)
    if peak and bandwidth:
        least_s = sum(op.least_seconds(peak, bandwidth) * op.times for op in s.ops)
    return {
        "basis": basis,
        "band": band,
        "mfu": mfu or ASSUMED_MFU,
        "peak_flops": peak,
        "peak_source": spec.source,
        "step_s": step_s,
        "least_s": least_s,  # if each operation takes its least time, with no fusion and nothing in a cache
        "tokens_per_s": step_s and c.tokens_per_step / step_s,
        "total_s": step_s and step_s * c.max_iters,
        "days": step_s and step_s * c.max_iters / 86400,
    }


def sum_of_operations(s, peak, bandwidth):
    """Return (seconds of a step, whether each of its operations was timed)."""
    ops = [op for op in s.ops if op.kind]
    expected = [expected_seconds(op, s.spec, peak, bandwidth) for op in ops]
    seconds = sum(seconds * op.times for op, (seconds, _) in zip(ops, expected, strict=True))
    seconds += s.spec.cross_core_s_per_byte * sum(op.cached_bytes * op.times for op in s.ops)
    return seconds, all(timed for _, timed in expected)


def expected_seconds(op, spec, peak, bandwidth):
    """Return the seconds of one execution of an operation, and whether exactly this operation was timed on the device.

    If it was not, the result is its roofline time times a factor. The factor is the weighted mean over the three timed
    operations that are nearest in FLOPs and bytes; they have the same kind and dtypes, if there are any such.
    """
    what, shapes = op.key
    same_kind = spec.op_times.get(what)
    if same_kind and shapes in same_kind:
        return same_kind[shapes][2], True
    if op.flops == op.bytes == 0:
        return 0.0, True

    def roofline(flops, n_bytes):
        return flops / peak + n_bytes / bandwidth + CALL_SECONDS

    def distance(flops, n_bytes):
        return math.hypot(math.log((1 + flops) / (1 + op.flops)), math.log((1 + n_bytes) / (1 + op.bytes)))

    timed = same_kind.values() if same_kind else itertools.chain(*(times.values() for times in spec.op_times.values()))
    factors = ((distance(flops, n_bytes), seconds / roofline(flops, n_bytes)) for flops, n_bytes, seconds in timed)
    nearest = sorted(factors)[:3]
    weights = [1 / (d * d + 1e-3) for d, _ in nearest]
    log_mean = sum(w * math.log(factor) for w, (_, factor) in zip(weights, nearest, strict=True)) / sum(weights)
    return roofline(op.flops, op.bytes) * math.exp(log_mean), False
