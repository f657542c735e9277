"""Numbers with units as text (bytes, SI prefixes, durations), sizes read from text, and the bounds of such numbers."""

import math

from cli.errors import ConfigError, require

MOST = 1e24  # a larger size, count, duration or price is taken for a mistake


def mib(n):
    """Return a number of bytes as text, in KiB, MiB or GiB."""
    if n < 2**20:
        return f"{n / 2**10:,.1f} KiB"
    return f"{n / 2**20:,.1f} MiB" if n < 2**30 else f"{n / 2**30:,.2f} GiB"


def si(n, unit=""):
    """Return a number as text, with three digits, an SI prefix and a unit, such as 874 GFLOP."""
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
    """Return the bytes of a size such as 40GB; None if text is None."""
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
        require(0 < value <= MOST, f"{name}={value} must lie in (0, {MOST:g}]")  # NaN fails too


def check_mfu(mfu):
    require(mfu is None or 0 < mfu <= 1, f"--mfu={mfu} must lie in (0, 1]")
