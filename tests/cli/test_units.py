"""Figures as text, with the unit that a reader would choose; and the bounds of those that a user gives."""

import pytest

from cli.errors import ConfigError
from cli.units import MOST, check_mfu, duration, mib, positive, si


@pytest.mark.parametrize(
    "n_bytes, text",
    [
        (0, "0.0 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1,024.0 KiB"), (2**20, "1.0 MiB"), (2**30 - 1, "1,024.0 MiB"),
        (2**30, "1.00 GiB"), (2000 * 2**30, "2,000.00 GiB"),
    ],
)  # fmt: skip
def test_bytes_are_in_powers_of_two(n_bytes, text):
    assert mib(n_bytes) == text


@pytest.mark.parametrize(
    "n, unit, text",
    [
        (0, "", "0"), (999, "", "999"), (1000, "", "1 k"), (874e9, "FLOP", "874 GFLOP"), (1.2345e6, "", "1.23 M"),
        (3e21, "FLOP", "3 ZFLOP"), (-5e6, "B", "-5 MB"), (12, "B/s", "12 B/s"), (0.25, "s", "0.25 s"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_prefix(n, unit, text):
    assert si(n, unit) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0123, "0.0123 s"), (59, "59 s"), (60, "1.0 min"), (3599, "60.0 min"), (5400, "1.5 h"),
        (86400, "1.0 days"), (86400 * 2500, "2,500.0 days"),
    ],
)  # fmt: skip
def test_durations_are_in_the_largest_unit_that_fits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("value", [0, -1, 1e25, float("inf"), float("nan")])
def test_what_is_not_positive_or_beyond_all_measure_is_refused_by_name(value):
    with pytest.raises(ConfigError) as caught:
        positive(hours=1, **{"--price": value})
    assert str(caught.value) == f"--price={value} must lie in (0, 1e+24]"
    positive(hours=1, price=MOST)


@pytest.mark.parametrize("mfu", [0, -0.1, 1.1, float("nan")])
def test_an_mfu_is_a_fraction_of_the_peak(mfu):
    with pytest.raises(ConfigError) as caught:
        check_mfu(mfu)
    assert str(caught.value) == f"--mfu={mfu} must lie in (0, 1]"
    for possible in (None, 1, 0.4):
        check_mfu(possible)
