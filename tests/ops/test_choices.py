"""In which dtype each operation computes: one table, which the model and the prediction both read."""

import pytest

from ops.choices import OP_DTYPES, operation_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device_kind", ["cpu", "cuda", "mps"])
def test_operation_dtypes(dtype, device_kind):
    assert operation_dtype("matmul", dtype, device_kind) == dtype
    assert operation_dtype("attention", dtype, device_kind) == OP_DTYPES.get((device_kind, "attention"), dtype)
    for kind in ("norm", "rope", "softmax", "loss", "residual", "embedding"):
        assert operation_dtype(kind, dtype, device_kind) == "float32"


def test_operation_dtype_can_differ_on_one_kind_of_device(monkeypatch):
    monkeypatch.setitem(OP_DTYPES, ("mps", "attention"), "float32")
    assert operation_dtype("attention", "bfloat16", "mps") == "float32"
    assert operation_dtype("attention", "bfloat16", "cuda") == "bfloat16"


def test_unknown_operation_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="'convolution' is none of"):
        operation_dtype("convolution", "bfloat16", "cuda")
