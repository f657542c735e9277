"""Figures as text, and back: bytes, SI prefixes, durations."""

import math

from config import ConfigError


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
