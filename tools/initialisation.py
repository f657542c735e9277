"""Draw why Xavier initialisation is needed: python -m tools.initialisation

A batch of unit variance passes through 24 linear layers of the same width. There are no norms and no residuals, which
would hide the effect. The variance after each layer is written to records/init/variance.json, and the figure to
records/init/variance.svg.
"""

import json
import math
import sys
from dataclasses import dataclass

import torch

from cli.errors import command, require
from cli.flags import parse
from config import ROOT
from model import xavier_std

FOLDER = ROOT / "records" / "init"
DEPTH, WIDTH = 24, 256
LINES = {"normal": ("N(0, 1)", "#c33"), "xavier": ("Xavier", "#26c")}  # curve -> (label, colour)


@dataclass(frozen=True)
class Options:
    """Draw the variance of activations over depth, with and without Xavier initialisation, to records/init."""


def variances(std):
    """Return the variance before the first layer and after each of DEPTH layers whose weights have this std."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(512, WIDTH)
    result = [x.var().item()]
    for _ in range(DEPTH):
        x = x @ (normal(WIDTH, WIDTH) * std).T
        result.append(x.var().item())
    return result


def measure():
    """Return the variances with weights from N(0, 1) and with Xavier initialisation."""
    return {"normal": variances(1.0), "xavier": variances(xavier_std(WIDTH, WIDTH))}


def svg(curves, width=640, height=300, left=70, bottom=40):
    """Return an SVG figure of the curves over depth, on a logarithmic axis."""
    top = 10 * math.ceil(max(math.log10(v) for curve in curves.values() for v in curve) / 10)

    def x(layer):
        return left + (width - left - 90) * layer / DEPTH

    def y(variance):
        return height - bottom - (height - bottom - 20) * (math.log10(variance) + 5) / (top + 5)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for power in range(0, top + 1, 10):
        parts.append(f'<path d="M{left} {y(10.0**power):.1f}H{width - 90}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">1e{power}</text>')
    for layer in range(0, DEPTH + 1, 4):
        below = height - bottom + 16
        parts.append(f'<text x="{x(layer):.1f}" y="{below}" text-anchor="middle">{layer}</text>')
    parts.append(
        f'<text x="{(left + width - 90) / 2}" y="{height - 6}" text-anchor="middle">'
        f"linear layers of width {WIDTH}</text>"
    )
    parts.append(
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">variance</text>'
    )
    for key, curve in curves.items():
        name, colour = LINES[key]
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x(DEPTH) + 8:.1f}" y="{y(curve[-1]) + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


@command
def main(argv):
    words, _ = parse(argv, (Options,), "python -m tools.initialisation")
    require(not words, f"tools.initialisation takes no arguments; got {' '.join(words)}")
    curves = measure()
    (FOLDER / "variance.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    (FOLDER / "variance.svg").write_text(svg(curves), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
