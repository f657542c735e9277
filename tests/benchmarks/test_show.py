"""Figures as text."""

import pytest

from benchmarks import show


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("tokens_per_s", 12345.6, "12,346"), ("bytes_per_s", 2.5e6, "2.5 MB/s"), ("peak_bytes", 2**20, "1.0 MiB"),
        ("step_s", 0.123456, "0.1235"), ("mfu", 0.4, "40.0%"), ("memory_ratio", 0.5, "0.500"),
        ("shape", "tiny", "tiny"), ("spread", [1.0, 2.0], "1..2"),
        ("same_tokens", True, "yes"), ("workers", None, "-"), ("workers", 2, "2"),
    ],
)  # fmt: skip
def test_figures_as_text(key, value, text):
    assert show.cell(key, value) == text
