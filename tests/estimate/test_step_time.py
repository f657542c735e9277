"""The time of a step whose operations nobody has timed; that of timed ones is in tests/measure/test_operations.py."""

import math

from estimate.predict import predict
from tests.estimate.helpers import CPU, config_of, total_flops


def test_time_is_flops_over_peak_and_mfu():
    config = config_of(max_iters=1000)
    time_ = predict(config, CPU, mfu=0.5)["time"]
    assert time_["step_s"] == total_flops(config) / (2e11 * 0.5)
    assert math.isclose(time_["tokens_per_s"] * time_["step_s"], config.tokens_per_step)
    assert time_["total_s"] == 1000 * time_["step_s"]
