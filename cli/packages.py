"""Versions of packages: one that is too old is reported at the start, before it fails during the run."""

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


def too_old(name):
    """Return an error message if an installed package is older than requirements.txt asks for; otherwise None.

    The package is not imported, because importing torch takes seconds.
    """
    import importlib.metadata  # rarely needed, and half the time that a command takes to start

    try:
        found, text = importlib.metadata.version(name), REQUIREMENTS.read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None  # importing the package gives a better message
    least = re.search(rf"^{name}>=([\d.]+)", text, re.M)
    if not least or numbers(found) >= numbers(least[1]):
        return None
    return f"{name} {found} is too old: {least[1]} or newer is needed; pip install -r requirements.txt"


def numbers(version):
    """Return the first two numbers of a version: [2, 13] of 2.13.0a0+cpu."""
    return [int(n) for n in re.findall(r"\d+", version)[:2]]
