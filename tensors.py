"""What a tensor is: a page on the memory behind it, on the formats of its numbers, and on what those formats lose.

Nothing on the page is only claimed: its tables say what each operation does, torch does it at every printing, and an
assertion stops the page where the two disagree.
"""

import functools
import math

import torch
from einops import rearrange

X = torch.arange(12, dtype=torch.float32).view(3, 4)  # the example
ITSELF, VIEW, COPY, ERROR = "x itself", "a view", "a copy", "an error"

OPERATIONS = [  # as one types it, what it gives, the same to be called
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
    """Return a row per operation on x: stride and offset in elements, where the data lies and what moves in bytes.

    A copy reads each of its elements from x and writes it, at the size of either dtype; all else moves nothing.
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


FORMATS = {  # torch's dtype, bytes in memory, exponent bits, mantissa bits, whether it has infinities
    "FP32": ("float32", 4, 8, 23, True),
    "TF32": (None, 4, 8, 10, True),  # a float32 as NVIDIA's tensor cores read it
    "FP16": ("float16", 2, 5, 10, True),
    "BF16": ("bfloat16", 2, 8, 7, True),
    "E4M3": ("float8_e4m3fn", 1, 4, 3, False),
    "E5M2": ("float8_e5m2", 1, 5, 2, True),
}


def dtypes():
    """Return a row per format: its bits, its largest and smallest values, its spacing at 1, all by formula.

    With e bits of exponent and m of mantissa a value is 1.mantissa x 2^(exponent - bias), bias = 2^(e - 1) - 1. The
    exponent 0 is kept for subnormals, 0.mantissa x 2^(1 - bias), that of all ones for infinities and NaN; without
    infinities only its last mantissa is NaN, and the one before is the largest value (Micikevicius et al. 2022).
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

# What, as computed in a dtype; what comes out in each of COLUMNS (-: not computed); the lesson. Beyond the range of
# E4M3, which has no infinity, torch gives the largest value, and in its older versions NaN (pytorch #178817).
LIMITS = [
    ("70,000", lambda d: torch.tensor(7e4).to(d), "70,000 inf 70,144 448|nan inf", "FP16 overflows, BF16 only rounds"),
    ("1e-8", lambda d: torch.tensor(1e-8).to(d), "1e-08 0 1.0012e-08 0 0", "why FP16 needs the loss scaled"),
    ("1 + 1/256", lambda d: torch.ones((), dtype=d) + 2**-8, "1.0039 1.0039 1 - -", "why weights and moments are FP32"),
    ("4,096 ones, one by one", lambda d: functools.reduce(torch.add, torch.ones(4096, dtype=d)),
     "4,096 2,048 256 - -", "why matmuls accumulate in FP32"),
    ("4,096 ones by sum()", lambda d: torch.ones(4096, dtype=d).sum(), "4,096 4,096 4,096 - -", "so does torch's sum"),
    ("50,256, a token's id", lambda d: torch.tensor(50256).to(d),
     "50,256 50,240 50,176 448|nan 49,152", "why ids are integers"),
    ("2^24 + 1", lambda d: torch.tensor(2**24 + 1).to(d),
     "16,777,216 inf 16,777,216 448|nan inf", "FP32 counts no further than 2^24"),
    ("exp(89)", lambda d: torch.full((), 89, dtype=d).exp(), "inf inf inf - -", "why softmax subtracts the max"),
]  # fmt: skip


def limits():
    """Return a row per computation: what torch makes of it in each dtype, as text, since JSON has no infinity."""
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

    yield "tensor      a data pointer, a shape, a stride for each axis, and a dtype to read the bytes as; y[i, j] lies"
    yield "            i stride[0] + j stride[1] elements behind the pointer, itself offset elements into the storage"
    size = f"{X.numel()} numbers of {X.element_size()} bytes"
    yield f"x           torch.arange(12.0).view(3, 4): {size}, at {X.data_ptr():#x} this time, on {X.device}"
    yield view("operation", "shape", "stride", "offset", "dtype", "contiguous", "data at", "which is", "moves")
    for r in rows():
        if r["is"] == ERROR:
            yield f"  {r['operation']:<30}{ERROR}: {r['error']}"
            continue
        at = "elsewhere" if r["bytes_from_x"] is None else f"x + {r['bytes_from_x']}"
        cells = (r["operation"], r["shape"], r["stride"], r["offset"], r["dtype"], "yes" if r["contiguous"] else "no")
        yield view(*cells, at, r["is"], f"{r['bytes_moved']} B")
    yield "  contiguous: the elements lie in memory in the shape's order, row by row, without a gap or a repetition"
    yield "  a view is a new shape, stride or dtype on x's bytes: writing to it writes x; stride 0 repeats an element"
    yield "  a copy moves what it reads and what it writes; reshape and rearrange copy only what no strides can express"

    def power(value):
        return f"2^{round(math.log2(value))} = {value:.3g}"

    yield ""
    yield "formats     one bit is the sign; the exponent's bits give the range, the mantissa's the precision"
    heads = ("bytes", "exponent", "mantissa", "largest", "spacing at 1", "least normal", "least of all")
    yield form("", "dtype", *heads)
    for r in dtypes():
        cells = (r["format"], r["dtype"] or "-", r["bytes"], r["exponent_bits"], r["mantissa_bits"])
        yield form(*cells, f"{r['largest']:.5g}", *(power(r[key]) for key in ("eps", "smallest_normal", "smallest")))
    yield "  spacing halves at every power of two down to the least normal; from there to 0 it is the least of all"
    yield "  TF32 is what tensor cores read of a float32, 19 of its 32 bits: it saves time and no memory"

    yield ""
    yield "limits      what a format makes of a number (-: not computed in FP8)"
    yield limit("", *COLUMNS, "").rstrip()
    found = limits()
    for r in found:
        yield limit(r["what"], *(r[dtype] or "-" for dtype in COLUMNS.values()), r["lesson"])
    beyond = "NaN" if found[0]["float8_e4m3fn"] == "nan" else "its largest value"
    yield f"  E4M3 has no infinity: beyond it torch {torch.__version__} gives {beyond}; why FP8 tensors carry a scale"
    yield "  an update of up to 1/512 of a BF16 weight is always lost, and one of more than 1/256 of it never is"
