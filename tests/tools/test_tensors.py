"""The page about tensors: its statements on memory, formats and limits are checked against torch in other ways."""

import inspect
import json
import math
from itertools import product

import pytest
import torch
from einops import rearrange

from tools import tensors

OPERATIONS = {f"{text} {says}": (i, text, says) for i, (text, says, _) in enumerate(tensors.OPERATIONS)}
VALID = {name: case for name, case in OPERATIONS.items() if case[2] != tensors.ERROR}


def typed(text, x):
    """Return what a user gets who types an operation. The text on the page is executed, not its function."""
    return eval(text, {"torch": torch, "rearrange": rearrange, "x": x})


def example():
    return typed("torch.arange(12.0).view(3, 4)", None)  # as the page writes it


# --- views and copies


def test_the_example_is_what_the_page_says_it_is():
    assert torch.equal(tensors.X, example()) and tensors.X.dtype == torch.float32
    line = next(line for line in tensors.lines() if line.startswith("x  "))
    assert f"{tensors.X.data_ptr():#x}" in line and "on cpu" in line and "arange(12.0).view(3, 4): 12 numbers" in line


@pytest.mark.parametrize("case", VALID.values(), ids=VALID)
def test_a_row_is_what_the_operation_gives_as_typed(case):
    i, text, says = case
    x, row = example(), tensors.rows()[i]
    y = typed(text, x)
    assert row["operation"] == text and row["is"] == says
    assert (row["shape"], row["stride"], row["offset"]) == (tuple(y.shape), y.stride(), y.storage_offset())
    assert getattr(torch, row["dtype"]) == y.dtype and row["contiguous"] == y.is_contiguous()
    inside = x.data_ptr() <= y.data_ptr() < x.data_ptr() + 48
    assert inside == (says != tensors.COPY) and (y is x) == (says == tensors.ITSELF)
    assert row["bytes_from_x"] == (y.data_ptr() - x.data_ptr() if inside else None)


@pytest.mark.parametrize("case", VALID.values(), ids=VALID)
def test_a_write_through_a_view_changes_x_and_one_into_a_copy_does_not(case):
    _, text, says = case
    x = example()
    y = typed(text, x)
    y[(0,) * y.dim()] = 77
    assert torch.equal(x, example()) == (says == tensors.COPY)


@pytest.mark.parametrize("case", VALID.values(), ids=VALID)
def test_strides_and_offset_find_every_element_in_the_storage(case):
    i, text, _ = case
    y, row = typed(text, example()), tensors.rows()[i]
    stored = torch.tensor([], dtype=y.dtype).set_(y.untyped_storage())
    for index in product(*map(range, row["shape"])):
        assert y[index] == stored[row["offset"] + sum(k * s for k, s in zip(index, row["stride"], strict=True))]


@pytest.mark.parametrize("case", VALID.values(), ids=VALID)
def test_a_copy_moves_the_elements_it_took_and_the_storage_it_made(case):
    i, text, says = case
    y = typed(text, example())
    taken = y.unique().numel() * 4  # the example's elements are all different, and float32
    assert tensors.rows()[i]["bytes_moved"] == (taken + y.untyped_storage().nbytes() if says == tensors.COPY else 0)


def test_a_transposed_tensor_has_no_flat_view_and_the_page_says_what_torch_says():
    with pytest.raises(RuntimeError) as error:
        typed("x.T.view(12)", example())
    (row,) = [row for row in tensors.rows() if row["is"] == tensors.ERROR]
    assert row["operation"] == "x.T.view(12)" and len(row["error"]) > 20 and str(error.value).startswith(row["error"])
    assert any("x.T.view(12)" in line and row["error"] in line for line in tensors.lines())


@pytest.mark.parametrize("case", OPERATIONS.values(), ids=OPERATIONS)
def test_a_wrong_expectation_stops_the_page(case, monkeypatch):
    i, text, says = case
    for wrong in {tensors.ITSELF, tensors.VIEW, tensors.COPY, tensors.ERROR} - {says}:
        table = list(tensors.OPERATIONS)
        table[i] = (text, wrong, table[i][2])
        monkeypatch.setattr(tensors, "OPERATIONS", table)
        with pytest.raises(AssertionError, match=f"is {says}, not {wrong}"):
            tensors.rows()


# --- formats


@pytest.mark.parametrize("row", [row for row in tensors.dtypes() if row["dtype"]], ids=tensors.COLUMNS)
def test_formats_are_those_of_torch(row):
    dtype = getattr(torch, row["dtype"])
    info = torch.finfo(dtype)
    assert (row["largest"], row["eps"], row["smallest_normal"]) == (info.max, info.eps, info.smallest_normal)
    assert row["bytes"] == dtype.itemsize and 1 + row["exponent_bits"] + row["mantissa_bits"] == info.bits
    least = torch.tensor([row["smallest"], row["smallest"] / 2], dtype=torch.float64).to(dtype)
    assert least.double().tolist() == [row["smallest"], 0]  # half of it is a tie, and goes to even


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_formats_agree_with_all_the_numbers_there_are(dtype):
    (row,) = [row for row in tensors.dtypes() if row["dtype"] == str(dtype).removeprefix("torch.")]
    codes = torch.arange(2 ** (8 * row["bytes"] - 1), dtype=torch.int32)  # those with the sign bit 0
    values = codes.to(torch.uint8 if row["bytes"] == 1 else torch.int16).view(dtype).double()
    finite = values[values.isfinite()]
    assert (finite.max(), finite[finite > 0].min()) == (row["largest"], row["smallest"])
    assert finite[finite > 1].min() == 1 + row["eps"]
    assert values.isinf().any() == (row["dtype"] != "float8_e4m3fn")


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16():
    (tf32,) = [row for row in tensors.dtypes() if row["format"] == "TF32"]
    full, half = torch.finfo(torch.float32), torch.finfo(torch.float16)
    assert tf32["bytes"] == 4 and tf32["smallest_normal"] == full.smallest_normal and tf32["eps"] == half.eps
    # the largest float32 whose last 13 bits are 0
    bits = torch.tensor(full.max).view(torch.int32) & ~(2**13 - 1)
    assert tf32["largest"] == bits.view(torch.float32).item()


# --- limits


def limit(what, dtype):
    (row,) = [row for row in tensors.limits() if row["what"].startswith(what)]
    return row[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in tensors.COLUMNS.values()], ids=tensors.COLUMNS)
def test_conversions_are_those_of_torch(dtype):
    for what, value in [("70,000", 70000.0), ("1e-8", 1e-8), ("50,256", 50256.0), ("2^24", 2.0**24 + 1)]:
        result = torch.tensor(value, dtype=torch.float64).to(torch.float32).to(dtype).double().item()
        said = float(limit(what, dtype).replace(",", ""))
        assert said == pytest.approx(result, rel=1e-4, abs=0, nan_ok=True)


def test_what_is_too_large_for_e4m3_goes_where_this_torch_sends_it():
    result = torch.tensor(70000.0).to(torch.float8_e4m3fn).float().item()
    assert limit("70,000", torch.float8_e4m3fn) == ("nan" if math.isnan(result) else f"{result:g}")
    (line,) = [line for line in tensors.lines() if "no infinity" in line]
    assert ("NaN" in line) == math.isnan(result) and torch.__version__ in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_sticks_where_one_is_half_the_spacing(dtype):
    sticks = min(4096, 2 / torch.finfo(dtype).eps)
    total = torch.zeros((), dtype=dtype)
    for _ in range(4096):
        total += 1
    assert limit("4,096 ones, one by one", dtype) == f"{sticks:,.0f}" == f"{total.item():,.0f}"
    assert limit("4,096 ones by sum()", dtype) == "4,096"


@pytest.mark.parametrize("sign", [1, -1])
def test_which_updates_of_bfloat16_weights_are_lost(sign):
    weights = torch.arange(2**7, 2**15, dtype=torch.int16).view(torch.bfloat16)  # all positive normal ones
    weights = weights[(weights > 2.0**-60) & (weights < 2.0**60)]  # whose 1/512 is normal too
    assert len(weights) > 119 * 2**7
    for update, lost in [(weights / 512, True), ((weights / 256).view(torch.int16) + 1, False)]:
        moved = weights + sign * update.view(torch.bfloat16)
        assert ((moved == weights) == lost).all()
    assert (weights + weights / 256 == weights).any() and limit("1 + 1/256", torch.bfloat16) == "1"


def test_exp_overflows_where_log_softmax_does_not():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        logits = torch.tensor([89.0, 0.0], dtype=dtype)
        assert limit("exp(89)", dtype) == "inf" and logits.exp()[0].isinf()
        assert logits.log_softmax(0).isfinite().all()


@pytest.mark.parametrize("i", range(len(tensors.LIMITS)), ids=[row[0] for row in tensors.LIMITS])
def test_a_wrong_limit_stops_the_page(i, monkeypatch):
    table, (what, compute, expected, lesson) = list(tensors.LIMITS), tensors.LIMITS[i]
    table[i] = (what, compute, " ".join(["5", *expected.split()[1:]]), lesson)
    monkeypatch.setattr(tensors, "LIMITS", table)
    with pytest.raises(AssertionError, match=r"in float32 is .*, not 5"):
        tensors.limits()


# --- the page


def test_the_page_fits_and_its_columns_stand_below_their_heads():
    page = list(tensors.lines())
    assert max(map(len, page)) <= 120 and all(line == line.rstrip() for line in page)
    assert [line.split()[0] for line in page if line[:1].strip()] == ["tensor", "x", "formats", "limits"]
    head = next(i for i, line in enumerate(page) if line.startswith("  operation"))
    starts = [page[head].index(name) for name in ("shape", "stride", "dtype", "contiguous", "data at", "result")]
    for row, line in zip(tensors.rows(), page[head + 1 :], strict=False):
        assert line.startswith(f"  {row['operation']} ")
        if row["is"] != tensors.ERROR:
            assert all(line[start - 1] == " " != line[start] for start in starts)
            assert f"x + {row['bytes_from_x']} " in line or (row["is"] == tensors.COPY and "elsewhere" in line)
    for table in ("formats", "limits"):
        head = page.index(next(line for line in page if line.startswith(table))) + 1
        ends = [page[head].index(name) + len(name) for name in page[head].split() if name in tensors.COLUMNS]
        assert table == "formats" or len(ends) == len(tensors.COLUMNS)
        for line in page[head + 1 : head + 1 + len(tensors.LIMITS if ends else tensors.FORMATS)]:
            assert all(line[end - 1] != " " and line[end : end + 1] in (" ", "") for end in ends)


def test_everything_is_json_without_infinities():
    result = tensors.everything()
    assert list(result) == ["views", "dtypes", "limits"] and inspect.isgeneratorfunction(tensors.lines)
    again = json.loads(json.dumps(result, allow_nan=False))
    assert [len(again[part]) for part in result] == [len(tensors.OPERATIONS), len(tensors.FORMATS), len(tensors.LIMITS)]


def test_the_page_leaves_the_example_as_it_was():
    list(tensors.lines())
    assert torch.equal(tensors.X, example())
