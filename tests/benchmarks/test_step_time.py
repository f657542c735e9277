"""What is recorded of several rounds of step times."""

from benchmarks import step_time


def test_the_round_with_the_median_ratio_is_recorded_with_all_ratios():
    rest = {
        "timed before": "a grid",
        "basis": "estimated",
        "command": "x",
        "predicted": 1.0,
        "band": 0.5,
        "within": True,
    }
    rounds = [rest | {"figure": "step time", "measured": ratio, "ratio": ratio} for ratio in (1.2, 0.9, 1.1)]
    expected = rest | {"measured": 1.1, "ratio": 1.1, "ratios": [1.2, 0.9, 1.1]}
    assert step_time.median(rounds) == expected
