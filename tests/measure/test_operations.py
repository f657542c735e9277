"""Operations run alone: what the estimate says they are is what runs, and what is summed is what was timed."""

import json
import math
from dataclasses import replace

import pytest
import torch

from config import ROOT
from estimate.predict import predict
from estimate.step import training_step
from estimate.step_time import ASSUMED_BAND, ESTIMATED_BAND, TIMED_BAND, expected_seconds
from hardware.spec import DeviceSpec
from measure import operations
from tests.estimate.helpers import GRID, config_of

PEAK, BANDWIDTH = 1e11, 1e10
CPU = DeviceSpec(
    "a CPU", "cpu", 2**34, {"bfloat16": PEAK, "float32": PEAK}, BANDWIDTH, "a test", ("float32", "bfloat16")
)
HERE = torch.device("cpu")


def roofline(op):
    return op.flops / PEAK + op.bytes / BANDWIDTH + 5e-6


def distinct(config):
    return {op.key: op for op in training_step(config, CPU).ops if op.kind}


# --- what runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", GRID)
def test_every_operation_runs_alone_with_the_shapes_and_dtypes_that_the_estimate_names(shape, dtype):
    for op in distinct(config_of(**GRID[shape], dtype=dtype, gradient_accumulation_steps=2)).values():
        run, idle = operations.runner(op, HERE)
        idle()
        found = run()
        if "update" in op.kind:
            continue
        if op.phase == "backward" and op.kind != "add gradients":
            expected = [b for b in op.inputs if b.kind not in ("batch", "table")]
            expected = {"add": expected[1:], "split": expected[:1]}.get(op.kind, expected)
        else:
            expected = list(op.inputs[1:]) if op.kind == "split" else [op.output]
            found = found if isinstance(found, list) else [found]
        assert len(found) == len(expected), op.key
        for tensor, buffer in zip(found, expected, strict=True):
            assert tensor.numel() == buffer.numel and tensor.dtype == getattr(torch, buffer.dtype), op.key


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_changes_its_parameter_and_idling_changes_nothing(compiled):
    kind = "one-pass update" if compiled else "update"
    op = next(op for op in training_step(config_of(compile_optimizer=compiled), CPU).ops if op.kind == kind)
    run, idle = operations.runner(op, HERE)
    parameter = run.__self__.parameters[0]
    before = parameter.clone()
    idle()
    assert torch.equal(parameter, before)
    run()
    assert not torch.equal(parameter, before)


def test_operations_of_one_key_are_alike_and_what_differs_has_another_key():
    config = config_of(n_layer=4)
    times = {}
    for op in (op for op in training_step(config, CPU).ops if op.kind):
        times.setdefault(op.key, set()).add((op.flops, op.bytes, op.phase == "backward"))
    # a gradient's reads may differ by what it was joined with, never its matmuls
    assert all(len({flops for flops, _, _ in found}) == 1 for found in times.values())
    other = distinct(config_of(n_layer=4, batch_size=4)).keys()
    assert {key for key in times.keys() & other if "3x32" in key[1] or "4x32" in key[1]} == set()


def test_timing_does_not_touch_what_a_run_draws():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for op in distinct(config_of()).values():
        operations.runner(op, HERE)
    assert torch.equal(torch.rand(3), expected)


# --- what is kept and summed


def test_each_operation_is_timed_once_and_kept(monkeypatch):
    timed = []
    monkeypatch.setattr(operations, "operation_seconds", lambda op, device: timed.append(op.key) or [0.5, 0.25, 0.75])
    config = config_of()
    record = operations.time_operations(training_step(config, CPU).ops, HERE, CPU)
    assert sorted(timed) == sorted(operations.ROUNDS * list(distinct(config)))
    assert {s for known in record.op_times.values() for *_, s in known.values()} == {0.5}
    timed.clear()
    assert operations.time_operations(training_step(config, CPU).ops, HERE, record) == record and not timed
    wider = training_step(config_of(n_embd=128), CPU).ops
    operations.time_operations(wider, HERE, record)
    assert timed and {key for key in timed if key[1] in record.op_times.get(key[0], {})} == set()


def test_a_step_is_the_sum_of_its_operations_as_often_as_they_run(monkeypatch):
    monkeypatch.setattr(operations, "operation_seconds", lambda op, device: [1.0])
    config = config_of(n_layer=7, gradient_accumulation_steps=3)
    s = training_step(config, CPU)
    record = operations.time_operations(s.ops, HERE, CPU)
    time = predict(config, record)["time"]
    assert time["step_s"] == sum(op.times for op in s.ops if op.kind)
    assert (time["basis"], time["band"]) == ("timed", TIMED_BAND)
    assert math.isclose(time["mfu"], predict(config, CPU)["flops"]["per_step"] / (time["step_s"] * PEAK))
    slower = predict(config, replace(record, cross_core_s_per_byte=1e-9))["time"]
    crossed = sum(op.cached_bytes * op.times for op in s.ops)
    assert math.isclose(slower["step_s"], time["step_s"] + 1e-9 * crossed) and crossed > 2**20
    assert predict(config, record, mfu=0.1)["time"]["basis"] == "given"  # what is asked for counts
    assert predict(config, CPU)["time"]["band"] == ASSUMED_BAND


def test_an_operation_of_another_shape_is_estimated_in_proportion_to_its_roofline(monkeypatch):
    monkeypatch.setattr(operations, "operation_seconds", lambda op, device: [3 * roofline(op)])
    record = operations.time_operations(
        [op for w in (32, 64, 256) for op in training_step(config_of(n_embd=w), CPU).ops], HERE, CPU
    )
    config = config_of(n_embd=128, n_layer=3)
    time = predict(config, record)["time"]
    s = training_step(config, CPU)
    exact = sum(op.times * 3 * roofline(op) for op in s.ops if op.kind and op.bytes)
    assert (time["basis"], time["band"]) == ("estimated", ESTIMATED_BAND)
    views = sum(op.times * 3 * 5e-6 for op in s.ops if op.kind and not op.bytes)
    assert exact <= time["step_s"] <= exact + views + 1e-9
    op = next(op for op in s.ops if op.kind == "linear")
    seconds, timed = expected_seconds(op, record, PEAK, BANDWIDTH)
    assert not timed and math.isclose(seconds, 3 * roofline(op))


def test_an_unknown_kind_is_estimated_from_the_others(monkeypatch):
    monkeypatch.setattr(
        operations, "operation_seconds", lambda op, device: [2 * (op.flops / PEAK + op.bytes / BANDWIDTH + 5e-6)]
    )
    record = operations.time_operations(training_step(config_of(), CPU).ops, HERE, CPU)
    op = next(op for op in training_step(config_of(activation="swiglu"), CPU).ops if op.kind == "silu")
    seconds, timed = expected_seconds(op, record, PEAK, BANDWIDTH)
    assert not timed and math.isclose(seconds, 2 * (op.bytes / BANDWIDTH + 5e-6))


def test_operations_are_timed_at_the_start_of_a_run_that_is_worth_it(monkeypatch):
    kept = []
    monkeypatch.setattr(operations, "operation_seconds", lambda op, device: [1e-3])
    monkeypatch.setattr("hardware.machine.write_local", kept.append)
    config = config_of()
    for run_s in (1.0, None):  # only the few that are timed first
        short = operations.with_operation_times(CPU, HERE, config_of(max_iters=1), run_s)
        assert sum(map(len, short.op_times.values())) == operations.PROBES and kept.pop() == short and not kept
    with monkeypatch.context() as patch:
        patch.setattr(operations, "PROBE_SECONDS", 0.0)
        assert not operations.with_operation_times(CPU, HERE, config_of(max_iters=1), 1.0).op_times and not kept
    long = operations.with_operation_times(CPU, HERE, config, 1e4)
    assert long.op_times and kept[-1] == long and not operations.not_timed(training_step(config, CPU).ops, long)
    n_kept = len(kept)
    assert operations.with_operation_times(long, HERE, config, 1e4).op_times == long.op_times and len(kept) == n_kept
    for unknown in ({"peak_flops": {}}, {"bandwidth": None}):  # then there is nothing to reckon the cost with
        assert not operations.with_operation_times(replace(CPU, **unknown), HERE, config, 1e4).op_times


def test_the_longest_operations_say_how_long_a_run_will_take(monkeypatch):
    """An assumed MFU may be far off: of a run that is thought to be short, the few longest operations tell better."""
    monkeypatch.setattr("hardware.machine.write_local", lambda spec: None)
    config, run_s = config_of(max_iters=50), 1e-3
    for seconds, all_of_them in ((1e-6, False), (1.0, True)):
        monkeypatch.setattr(operations, "operation_seconds", lambda op, device, seconds=seconds: [seconds])
        spec = operations.with_operation_times(CPU, HERE, config, run_s)
        time = predict(config, spec)["time"]
        n_timed = sum(map(len, spec.op_times.values()))
        assert (n_timed > operations.PROBES) == all_of_them == (time["basis"] == "timed")
        if not all_of_them:
            assert n_timed == operations.PROBES and (time["basis"], time["band"]) == ("estimated", ASSUMED_BAND)


def test_a_real_time_is_of_the_right_size():
    """A matmul of 0.3 GFLOP takes between 0.1 ms and 1 s on anything; the tiniest operation takes less."""
    op = next(op for op in training_step(config_of(n_embd=512, batch_size=9), CPU).ops if op.kind == "linear")
    assert op.flops > 3e8
    assert all(1e-4 < s < 1 for s in operations.operation_seconds(op, HERE))
    norms = [op for op in training_step(config_of(), CPU).ops if op.kind == "gradient norm"]
    assert all(-1e-3 < s < 0.1 for s in operations.operation_seconds(norms[-1], HERE))


# --- what was found


def test_recorded_step_times_are_within_the_stated_bands():
    rows = {row["case"]: row for row in json.loads((ROOT / "records" / "step_time.json").read_text("utf-8"))["rows"]}
    timed = [row for row in rows.values() if row["timed before"] == "its operations"]
    others = [row for row in rows.values() if row["timed before"] == "a grid"]
    assert len(timed) == 3 and len(others) == 2
    assert all(row["basis"] == "timed" and abs(row["ratio"] - 1) <= 0.15 for row in timed)
    assert all(row["basis"] == "estimated" and abs(row["ratio"] - 1) <= 0.25 for row in others)
