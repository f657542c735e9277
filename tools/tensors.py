"""Explain what a tensor is: python -m tools.tensors [--json]

It prints a page about the memory of a tensor, the formats of its numbers, and the precision that these formats lose.

Every statement in the tables is checked: each time the page is printed, torch executes the operations, and an assertion
fails if a result differs from what the table expects.
"""

import functools
import json
import math
import sys
from dataclasses import dataclass

import torch
from einops import rearrange

from cli.errors import command
from cli.flags import parse


@dataclass(frozen=True)
class Options:
    """Explain what a tensor is: pointers, strides, views and copies; the range and the precision of each dtype."""

    json: bool = False  # print the tables as JSON


X = torch.arange(12, dtype=torch.float32).view(3, 4)  # the tensor that the examples use
ITSELF, VIEW, COPY, ERROR = "x itself", "a view", "a copy", "an error"

OPERATIONS = [  # (text of the operation, expected kind of result, function that executes it)
    ("x", ITSELF, lambda x: x),
    ("x.contiguous()", ITSELF, lambda x: x.contiguous()),
    ("x.to(torch.float32)", ITSELF, lambda x: x.to(torch.float32)),
    ("x.view(2, 6)", VIEW, lambda x: x.view(2, 6)),
    ("x.reshape(2, 6)", VIEW, lambda x: x.reshape(2, 6)),
    ('rearrange(x, "r c -> (r c)")', VIEW, lambda x: rearrange(x, "r c -> (r c)")),
    ("x[None]", VIEW, lambda x: x[None]),
    ("x[None].expand(8, 3, 4)", VIEW, lambda x: x[None].expand(8, 3, 4)),
    ("x[1:]", VIEW, lambda x: x[1:]),
    ("x[:, 1]", VIEW, lambda x: x[:, 1]),
    ("x.view(torch.int32)", VIEW, lambda x: x.view(torch.int32)),
    ("x.T", VIEW, lambda x: x.T),
    ('rearrange(x, "r c -> c r")', VIEW, lambda x: rearrange(x, "r c -> c r")),
    ("x.T.view(12)", ERROR, lambda x: x.T.view(12)),
    ("x.T.reshape(12)", COPY, lambda x: x.T.reshape(12)),
    ('rearrange(x, "r c -> (c r)")', COPY, lambda x: rearrange(x, "r c -> (c r)")),
    ("x.T.contiguous()", COPY, lambda x: x.T.contiguous()),
    ("x.clone()", COPY, lambda x: x.clone()),
    ("x.to(torch.bfloat16)", COPY, lambda x: x.to(torch.bfloat16)),
    ("x[[0, 2]]", COPY, lambda x: x[[0, 2]]),
]


def rows():
    """Return a row per operation on x. Stride and offset are in elements; bytes_from_x and bytes_moved are in bytes.

    A copy reads each of its elements from x, in the size of x's dtype, and writes it in the size of its own dtype. The
    other operations move no data.
    """
    found, storage = [], X.untyped_storage().data_ptr()
    for text, expected, operation in OPERATIONS:
        try:
            y = operation(X)
            shares = y.untyped_storage().data_ptr() == storage
            row = {
                "operation": text, "shape": tuple(y.shape), "stride": y.stride(), "offset": y.storage_offset(),
                "dtype": str(y.dtype).removeprefix("torch."), "contiguous": y.is_contiguous(),
                "bytes_from_x": y.data_ptr() - storage if shares else None,
                "is": ITSELF if y is X else VIEW if shares else COPY,
                "bytes_moved": 0 if shares else y.numel() * (X.element_size() + y.element_size()),
            }  # fmt: skip
        except RuntimeError as error:
            row = {"operation": text, "is": ERROR, "error": str(error).partition(" (")[0]}
        assert row["is"] == expected, f"{text} is {row['is']}, not {expected}"
        found.append(row)
    return found


FORMATS = {  # name -> (torch's dtype, bytes in memory, exponent bits, mantissa bits, whether it has infinities)
    "FP32": ("float32", 4, 8, 23, True),
    "TF32": (None, 4, 8, 10, True),  # the bits of a float32 that NVIDIA's tensor cores read
    "FP16": ("float16", 2, 5, 10, True),
    "BF16": ("bfloat16", 2, 8, 7, True),
    "E4M3": ("float8_e4m3fn", 1, 4, 3, False),
    "E5M2": ("float8_e5m2", 1, 5, 2, True),
}


def dtypes():
    """Return a row per format: its bits, its largest and smallest values, and its spacing at 1, computed by formula.

    With e exponent bits and m mantissa bits, a value is 1.mantissa x 2^(exponent - bias), where bias = 2^(e - 1) - 1.
    The exponent 0 is reserved for subnormals, 0.mantissa x 2^(1 - bias), and the exponent of all ones for infinities
    and NaN. In a format without infinities, only the mantissa of all ones is NaN there, and the mantissa before it
    gives the largest value (Micikevicius et al. 2022).
    """
    found = []
    for name, (dtype, n_bytes, e, m, infinities) in FORMATS.items():
        bias, eps = 2 ** (e - 1) - 1, 2.0**-m
        largest = 2.0**bias * (2 - eps) if infinities else 2.0 ** (bias + 1) * (2 - 2 * eps)
        normal = 2.0 ** (1 - bias)
        found.append({"format": name, "dtype": dtype, "bytes": n_bytes, "exponent_bits": e, "mantissa_bits": m,
                      "largest": largest, "eps": eps, "smallest_normal": normal, "smallest": normal * eps})  # fmt: skip
    return found


COLUMNS = {name: dtype for name, (dtype, *_) in FORMATS.items() if dtype}

# (name, computation in a dtype, expected result in each of COLUMNS, what follows from it). "-" is not computed, and
# "a|b" allows either. E4M3 has no infinity: beyond its range, torch returns the largest value, or NaN in older versions
# (pytorch #178817).
LIMITS = [
    ("70,000", lambda d: torch.tensor(7e4).to(d), "70,000 inf 70,144 448|nan inf", "FP16 overflows, BF16 only rounds"),
    ("1e-8", lambda d: torch.tensor(1e-8).to(d), "1e-08 0 1.0012e-08 0 0", "so the loss is scaled in FP16"),
    ("1 + 1/256", lambda d: torch.ones((), dtype=d) + 2**-8, "1.0039 1.0039 1 - -", "so weights and moments are FP32"),
    ("4,096 ones, one by one", lambda d: functools.reduce(torch.add, torch.ones(4096, dtype=d)),
     "4,096 2,048 256 - -", "so matmuls accumulate in FP32"),
    ("4,096 ones by sum()", lambda d: torch.ones(4096, dtype=d).sum(),
     "4,096 4,096 4,096 - -", "sum() accumulates in FP32"),
    ("50,256, a token's id", lambda d: torch.tensor(50256).to(d),
     "50,256 50,240 50,176 448|nan 49,152", "so ids are integers"),
    ("2^24 + 1", lambda d: torch.tensor(2**24 + 1).to(d),
     "16,777,216 inf 16,777,216 448|nan inf", "FP32 is exact only up to 2^24"),
    ("exp(89)", lambda d: torch.full((), 89, dtype=d).exp(), "inf inf inf - -", "so softmax subtracts the maximum"),
]  # fmt: skip


def limits():
    """Return a row per computation with torch's result in each dtype, as text, because JSON has no infinity."""
    found = []
    for what, compute, expected, lesson in LIMITS:
        row = dict.fromkeys(("what", *COLUMNS.values()))
        for dtype, outcome in zip(COLUMNS.values(), expected.split(), strict=True):
            if outcome != "-":
                value = compute(getattr(torch, dtype)).item()
                row[dtype] = f"{value:,.0f}" if value.is_integer() else f"{value:.5g}"
                assert row[dtype] in outcome.split("|"), f"{what} in {dtype} is {row[dtype]}, not {outcome}"
        found.append(row | {"what": what, "lesson": lesson})
    return found


def everything():
    return {"views": rows(), "dtypes": dtypes(), "limits": limits()}


def lines():
    """Yield the page as text."""
    view = "  {!s:<30}{!s:<11}{!s:<11}{:>6}  {:<10}{:<12}{:<11}{:<10}{:>8}".format
    form = "  {:<6}{:<15}{:>5}{:>10}{:>10}{:>13}{:>19}{:>19}{:>19}".format
    limit = "  {:<24}{:>12}{:>12}{:>12}{:>12}{:>12}  {}".format

    yield "tensor      A tensor y is a pointer, a shape, a stride for each axis, and a dtype. The pointer is the"
    yield "            address of y[0, 0], `offset` elements after the start of the storage (the allocated memory)."
    yield "            y[i, j] is i stride[0] + j stride[1] elements after the pointer."
    size = f"{X.numel()} numbers of {X.element_size()} bytes"
    yield f"x           torch.arange(12.0).view(3, 4): {size}, on {X.device}, now at the address {X.data_ptr():#x}"
    yield view("operation", "shape", "stride", "offset", "dtype", "contiguous", "data at", "result", "moves")
    for r in rows():
        if r["is"] == ERROR:
            yield f"  {r['operation']:<30}{ERROR}: {r['error']}"
            continue
        at = "elsewhere" if r["bytes_from_x"] is None else f"x + {r['bytes_from_x']}"
        cells = (r["operation"], r["shape"], r["stride"], r["offset"], r["dtype"], "yes" if r["contiguous"] else "no")
        yield view(*cells, at, r["is"], f"{r['bytes_moved']} B")
    yield "  Contiguous: the elements are stored row by row in the order of the shape, without gaps or repetitions."
    yield "  A view is x's bytes in another shape, stride or dtype. Writing to it changes x."
    yield "  An axis with stride 0 repeats the same elements."
    yield "  A copy moves the bytes that it reads and writes. reshape and rearrange copy only if no strides fit."

    def power(value):
        return f"2^{round(math.log2(value))} = {value:.3g}"

    yield ""
    yield "formats     One bit is the sign. The exponent bits determine the range, and the mantissa bits the precision."
    heads = ("bytes", "exponent", "mantissa", "largest", "spacing at 1", "smallest normal", "smallest")
    yield form("", "dtype", *heads)
    for r in dtypes():
        cells = (r["format"], r["dtype"] or "-", r["bytes"], r["exponent_bits"], r["mantissa_bits"])
        yield form(*cells, f"{r['largest']:.5g}", *(power(r[key]) for key in ("eps", "smallest_normal", "smallest")))
    yield "  The spacing halves at each power of two towards 0. Below the smallest normal number it is constant."
    yield "  TF32 is the 19 bits that tensor cores read of a 32-bit float. It saves time, but no memory."

    yield ""
    yield "limits      What each format does to a number (-: not computed, because torch has no arithmetic in FP8)."
    yield limit("", *COLUMNS, "").rstrip()
    found = limits()
    for r in found:
        yield limit(r["what"], *(r[dtype] or "-" for dtype in COLUMNS.values()), r["lesson"])
    beyond = "NaN" if found[0]["float8_e4m3fn"] == "nan" else "the largest value"
    yield f"  E4M3 has no infinity. Beyond its range, torch {torch.__version__} gives {beyond}. FP8 needs scaling."
    yield "  In BF16, an update of at most 1/512 of a weight is always lost, and one of more than 1/256 never is."


@command
def main(argv):
    _, flags = parse(argv, (Options,), "python -m tools.tensors")
    print(json.dumps(everything(), indent=2) if flags.get("json") else "\n".join(lines()))


if __name__ == "__main__":
    sys.exit(main())
