"""Figures as text, and back: bytes, SI prefixes, durations; and the bounds of any."""

import math

from config import ConfigError, require

MOST = 1e24  # no size, count, duration or price that anybody means is larger


def mib(n):
    """Return bytes in KiB, MiB or GiB."""
    if n < 2**20:
        return f"{n / 2**10:,.1f} KiB"
    return f"{n / 2**20:,.1f} MiB" if n < 2**30 else f"{n / 2**30:,.2f} GiB"


def si(n, unit=""):
    """Return a number in three digits with its SI prefix and unit, such as 874 GFLOP."""
    for power, prefix in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(n) >= 10**power:
            return f"{n / 10**power:.3g} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def duration(seconds):
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def parse_memory(text):
    """Return bytes from a size with a unit, or None from None."""
    if text is None:
        return None
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("GB", 10**9), ("MB", 10**6)):
        if text.endswith(unit):
            try:
                n_bytes = float(text.removesuffix(unit)) * size
            except ValueError:
                break
            if 0 < n_bytes < math.inf:
                return int(n_bytes)
    raise ConfigError(f"--memory={text}: expects a size with its unit, such as 39.5GiB or 40GB")


def positive(**values):
    for name, value in values.items():
        require(0 < value <= MOST, f"{name}={value} must lie in (0, {MOST:g}]")  # false of nan too
