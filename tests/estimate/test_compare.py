"""Comparisons against the predictions they rest on: one config on every card, and two configs on one."""

import math
import time
from dataclasses import replace

from config import resolve
from estimate.compare import compare, compare_cards, compare_cards_lines, compare_lines
from estimate.predict import predict
from hardware.accelerators import ACCELERATORS, accelerator
from tests.estimate.helpers import GPT2, UNKNOWN, config_of, message_of, peak

H100 = accelerator("h100-sxm")


# --- which card


def test_every_card_is_compared_each_in_its_own_dtype():
    gpt2 = replace(GPT2, dropout=0.1)  # whose masks differ between kinds of device
    rows = compare_cards(gpt2, mfu=0.4)
    by_name = {r["name"]: r for r in rows}
    assert set(by_name) == set(ACCELERATORS) and len(rows) == len(ACCELERATORS)
    for name in ("v100-sxm-16gb", "a100-40gb", "rtx4090", "h100-sxm", "mi300x", "tpu-v4"):
        spec, row = accelerator(name), by_name[name]
        config = resolve(gpt2, spec)
        prediction = predict(config, spec, mfu=0.4)
        assert row["dtype"] == config.dtype
        assert row["step_s"] == prediction["time"]["step_s"] and row["fits"] is prediction["fits"]
        assert math.isclose(row["days"] * 86400, prediction["time"]["total_s"])
        if spec.memory_bytes is None:
            assert row["largest_batch"] is row["fits"] is None
            continue
        sizes = [replace(config, batch_size=row["largest_batch"] + more) for more in (0, 1)]
        assert peak(sizes[0], spec) <= spec.memory_bytes < peak(sizes[1], spec)
    assert by_name["v100-sxm-16gb"]["dtype"] == "float16"


def test_cards_that_fit_come_first_and_the_fastest_of_them():
    rows = compare_cards(replace(GPT2, batch_size=40), mfu=0.4)
    fits = [r["fits"] for r in rows]
    assert fits == sorted(fits, key=[True, None, False].index) and set(fits) == {True, None, False}
    steps = [r["step_s"] for r in rows if r["fits"] and r["step_s"]]
    assert steps == sorted(steps) and len(steps) > 10


def test_cards_where_no_batch_fits_come_last():
    rows = compare_cards(replace(GPT2, n_layer=48, n_embd=1536, batch_size=1000), mfu=0.4)
    none_fits = [r["largest_batch"] == 0 for r in rows]
    assert none_fits == sorted(none_fits) and set(none_fits) == {True, False}


def test_what_is_unknown_is_printed_as_such():
    rows = compare_cards(GPT2)
    lines = {line.split()[0]: line for line in compare_cards_lines(rows, 0.4)}
    assert lines["a10g"].count("n/a") == 2  # no peak: neither a step nor the run
    assert lines["b300"].count("n/a") == 3  # no memory: nor whether it fits, nor how much
    assert "n/a" not in lines["h100-sxm"] and " 78.69 GiB " in lines["h100-sxm"]
    assert "times assume an MFU of 40%, give or take 50%" in lines["one"]


def test_a_card_that_lacks_the_dtype_takes_its_own():
    by_name = {r["name"]: r["dtype"] for r in compare_cards(replace(GPT2, dtype="bfloat16"))}
    assert (by_name["t4"], by_name["a100-40gb"]) == ("float16", "bfloat16")
    assert {r["dtype"] for r in compare_cards(replace(GPT2, dtype="float32"))} == {"float32"}


def test_an_mfu_of_nothing_is_refused():
    assert "mfu=0" in message_of(lambda: compare_cards(GPT2, mfu=0))


def test_all_cards_are_compared_at_once():
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        compare_cards(GPT2)
        best = min(best, time.perf_counter() - start)
    assert best < 1


# --- what a change would do


def test_a_config_compared_with_itself_differs_in_nothing():
    config = resolve(GPT2, H100)
    result = compare(config, config, H100)
    assert result["settings"] == {}
    assert len(result["figures"]) > 10 and all(d == 0 and a == b for a, b, d in result["figures"].values())
    assert not any("%" in line for line in compare_lines(result))


def test_a_change_is_shown_in_settings_and_figures():
    config = resolve(GPT2, H100)
    other = replace(config, batch_size=6, gradient_accumulation_steps=80)
    result = compare(config, other, H100, mfu=0.5)
    assert result["settings"] == {"batch_size": (12, 6), "gradient_accumulation_steps": (40, 80)}
    figures = result["figures"]
    peaks = peak(config, H100), peak(other, H100)
    assert figures["peak, bytes"] == (*peaks, peaks[1] - peaks[0])
    assert figures["FLOPs a step"][2] == figures["a step"][2] == figures["parameters"][2] == 0
    assert figures["a step"][0] == predict(config, H100, mfu=0.5)["time"]["step_s"]
    lines = "\n".join(compare_lines(result))
    assert "batch_size: 12 -> 6" in lines and "-50.0%" in lines


def test_a_comparison_without_a_known_peak_has_no_times():
    result = compare(config_of(), config_of(), UNKNOWN)
    assert result["figures"]["a step"] == (None, None, None)
    assert sum("n/a" in line for line in compare_lines(result)) == 2
