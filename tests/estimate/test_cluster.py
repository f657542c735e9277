"""A run on many GPUs: what can be worked out by hand, and what must hold between one GPU and many."""

import json
from dataclasses import replace

import pytest

import accounting
from cli.config_file import read_settings
from cli.errors import ConfigError
from cli.units import mib
from config import ROOT, Config, resolve
from estimate import cluster
from estimate.predict import predict
from hardware.accelerators import accelerator

A100 = accelerator("a100-40gb")
GPT2 = resolve(Config(vocab_size=50304, batch_size=12, gradient_accumulation_steps=40), A100)  # 480 sequences
N = 124_373_760


@pytest.mark.parametrize(
    "n_gpus, expected",
    [
        (1, (1, 1, 12, 40)),
        (8, (8, 1, 12, 5)),
        (60, (60, 1, 8, 1)),
        (96, (96, 1, 5, 1)),
        (480, (480, 1, 1, 1)),
        (960, (480, 2, 1, 1)),
        (1920, (480, 4, 1, 1)),
    ],
)
def test_sequences_are_divided_evenly(n_gpus, expected):
    replicas, share, micro_batch, micro_steps = cluster.degrees(GPT2, n_gpus)
    assert (replicas, share, micro_batch, micro_steps) == expected
    assert replicas * micro_batch * micro_steps == 480 and replicas * share == n_gpus


@pytest.mark.parametrize(
    "n_gpus, words",
    [
        (7, "does not divide the 480 sequences of a step; 6 and 8 do"),
        (500, "is not a multiple"),
        (480 * 5, "n_head=12 does not divide by 5"),
        (0, "must lie in"),
        (-8, "must lie in"),
        (10**7, "must lie in"),
    ],
)
def test_impossible_degrees_are_refused(n_gpus, words):
    with pytest.raises(ConfigError, match=words):
        cluster.degrees(GPT2, n_gpus)


def test_an_mlp_has_no_heads_to_divide():
    mlp = resolve(Config(model="mlp", vocab_size=65, batch_size=1, gradient_accumulation_steps=1), A100)
    with pytest.raises(ConfigError, match="no heads"):
        cluster.degrees(mlp, 2)


def test_states_are_16_bytes_a_parameter_over_all():
    for n_gpus in (1, 8, 480, 960):
        found = cluster.on_cluster(GPT2, A100, n_gpus)
        assert found["memory"]["states"] == -(-16 * N // n_gpus)
    assert found["memory"]["gathered"] == 8 * (50304 * 768 // 2)  # the table is the largest unit, two GPUs share it


def test_each_gathers_all_weights_twice_and_scatters_gradients_once_a_micro_step():
    found = cluster.on_cluster(GPT2, A100, 8)
    assert found["moved_bytes"] == 5 * ((2 + 2 + 4) * N * 7 // 8)
    assert cluster.on_cluster(GPT2, A100, 1)["moved_bytes"] == 0
    shared = cluster.on_cluster(GPT2, A100, 960)
    assert shared["moved_bytes"] == 8 * (N // 2) * 479 // 480 + 8 * 12 * 1024 * 768 * 2 // 2


def test_one_gpu_alone_needs_no_less_than_the_prediction_and_more_need_less():
    alone = predict(GPT2, A100)["memory"]["peak"]
    peaks = [cluster.on_cluster(GPT2, A100, n)["peak"] for n in (1, 2, 8, 40, 480)]
    assert alone <= peaks[0] < 1.2 * alone
    assert peaks == sorted(peaks, reverse=True)


def test_time_is_divided_and_what_is_moved_must_hide_behind_it():
    one, found = predict(GPT2, A100, mfu=0.5)["time"], cluster.on_cluster(GPT2, A100, 8, mfu=0.5)
    assert found["step_s"] == one["step_s"] / 8
    assert found["bandwidth_to_hide"] == found["moved_bytes"] / found["step_s"]
    times = cluster.cluster_times(one, found)
    assert times["days"] == one["days"] / 8 and times["tokens_per_s"] == 8 * one["tokens_per_s"]
    assert times["mfu"] == one["mfu"]


def test_the_smallest_cluster_is_the_first_that_fits():
    large = replace(GPT2, n_layer=48, n_embd=1600, n_head=25, head_dim=64, d_ff=6400, batch_size=1,
                    gradient_accumulation_steps=512)  # fmt: skip
    memory = 20 * 10**9
    assert predict(large, A100, memory)["fits"] is False
    found = cluster.smallest_cluster(large, A100, memory)
    assert found["fits"] and found["n_gpus"] > 1
    half = found["n_gpus"] // 2
    assert half == 1 or not cluster.on_cluster(large, A100, half, memory)["fits"]
    assert cluster.smallest_cluster(large, A100, 2**20) is None


def test_the_command_line_spreads_a_config_and_prices_it(capsys):
    words = ["--vocab_size=50304", "--batch_size=12", "--gradient_accumulation_steps=40", "--gpu=a100-40gb"]
    assert accounting.main([*words, "--n_gpus=8", "--price=2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    time = printed["time"]
    assert time["price"] == pytest.approx(time["total_s"] / 3600 * 8 * 2)
    assert printed["fits"] is printed["cluster"]["fits"] is True and printed["cluster"]["n_gpus"] == 8
    assert accounting.main([*words, "--n_gpus=8", "--price=2"]) == 0
    text = capsys.readouterr().out
    assert "GPU-hours" in text and "8 x NVIDIA A100 SXM4 40 GB: 8 replicas" in text and "this is arithmetic" in text
    found = printed["cluster"]
    first = f"fits        yes: {mib(found['peak'])} at the peak on each of 8 GPUs"  # and nothing of one card alone
    assert text.startswith(first) and text.count("iB at the peak") == 1 and "memory" not in printed


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--n_gpus=7"], "does not divide"),
        (["--n_gpus=2", "--explain"], "--n_gpus does not go with --explain"),
        (["--price=2", "--compare"], "--price does not go with --compare"),
        (["--price=-2"], "--price=-2"),
    ],
)
def test_mistakes_are_one_line_and_status_2(words, expected, capsys):
    sizes = ["--vocab_size=50304", "--gradient_accumulation_steps=40", "--gpu=a100-40gb"]
    assert accounting.main([*sizes, *words]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--n_gpus=2"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_does_not_fit_is_answered_with_status_3(words, form, capsys):
    sizes = ["--vocab_size=50304", "--gradient_accumulation_steps=40", "--gpu=a100-40gb", "--memory=1GiB"]
    assert accounting.main([*sizes, *words, *form]) == 3
    printed = capsys.readouterr()
    if form:
        assert json.loads(printed.out)["fits"] is False and printed.err == ""
    else:
        assert printed.out.startswith("fits        no: ") and printed.err.count("\n") == 1
        assert ("on each of 2 GPUs, but" in printed.err) == bool(words)


def test_where_sharding_alone_leaves_no_room_it_takes_recomputation_too(capsys):
    config = ROOT / "configs" / "published" / "llama2_70b.py"
    assert accounting.main([str(config), "--gpu=h100-sxm"]) == 3
    printed = capsys.readouterr().out
    h100 = accelerator("h100-sxm")
    llama = resolve(Config(**read_settings(config, Config)), h100)
    found = cluster.smallest_cluster(llama, h100, h100.memory_bytes)
    assert found["recompute"] == "block" and found["peak"] <= h100.memory_bytes
    assert not cluster.on_cluster(llama, h100, 1024)["fits"]  # without it, however many share the states
    assert f"over {found['n_gpus']} such cards, with --recompute=block; this is only calculated" in printed
    assert "a smaller batch cannot help: parameters, gradients and optimizer state alone need" in printed
