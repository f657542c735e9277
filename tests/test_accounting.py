"""accounting.py's command line: its JSON, the hardware that flags describe, and what it refuses."""

import json
import resource
import subprocess
import sys

import pytest

import accounting
from cli.units import parse_memory
from config import ROOT
from hardware.accelerators import accelerator


def test_integers_are_integers_and_json_keys_are_there(capsys):
    assert accounting.main(["--vocab_size=65", "--n_layer=2", "--gpu=a100-40gb", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    integers = """model.params model.params_matmul flops.forward_per_token flops.per_token flops.per_step
        flops.six_nd_per_token memory.params memory.gradients memory.optimizer memory.activations memory.loss
        memory.peak"""
    for path in integers.split():
        group, key = path.split(".")
        assert type(printed[group][key]) is int, path
    others = """flops.hardware_per_step memory.peak_at memory.timeline memory.kv_cache_per_token time.step_s
        time.tokens_per_s time.total_s time.days fits max_batch_size roofline"""
    for path in others.split():
        value = printed
        for key in path.split("."):
            value = value[key]
        assert value is not None, path
    assert all(type(entry["bytes"]) is int for entry in printed["memory"]["timeline"])
    assert max(entry["bytes"] for entry in printed["memory"]["timeline"]) == printed["memory"]["peak"]
    assert printed["flops"]["six_nd_per_token"] == 6 * printed["model"]["params"]
    assert printed["fits"] is True and printed["memory"]["peak_at"]


def test_a_card_is_given_by_hand(capsys):
    words = ["--vocab_size=65", "--n_layer=2", "--json"]
    assert accounting.main([*words, "--peak_flops=5e14", "--bandwidth=2e12", "--memory=64GB", "--mfu=0.5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["time"]["step_s"] == printed["flops"]["per_step"] / (5e14 * 0.5)
    assert printed["memory"]["available"] == 64 * 10**9 and printed["roofline"]["ridge"] == 250
    assert accounting.main([*words, "--gpu=h100-sxm", "--peak_flops=8e14"]) == 0  # measured on it, say
    printed = json.loads(capsys.readouterr().out)
    h100 = accelerator("h100-sxm").memory_bytes
    assert printed["time"]["peak_flops"] == 8e14 and printed["memory"]["available"] == h100
    for flag in ("--peak_flops=0", "--bandwidth=-1", "--peak_flops=1e30"):
        assert accounting.main([*words, flag]) == 2
        assert flag.split("=")[0] in capsys.readouterr().err


def test_flags_go_for_both_of_two_configs(tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text("n_layer = 4\nbatch_size = 99\n", encoding="utf-8")
    argv = ["--vocab_size=65", "--n_layer=2", "--batch_size=3", f"--vs={other}", "--gpu=t4", "--json"]
    assert accounting.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {}  # each of its settings is overridden


def test_a_command_is_answered_at_once():
    """In seconds of the processor, which another process's load does not lengthen."""
    config = ROOT / "configs" / "published" / "llama3_405b.py"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, ROOT / "accounting.py", config, "--gpu=h100-sxm", "--n_gpus=16384", "--json"],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.3


# --- mistakes


def test_sizes_with_units():
    assert (parse_memory("39.5GiB"), parse_memory("40GB"), parse_memory(None)) == (42_412_802_048, 40 * 10**9, None)


@pytest.mark.parametrize("text", ["39.5", "lots", "-1GiB", "0GiB", "GiB", "infGiB", "3TB "])
def test_a_size_without_a_unit_is_refused(text, capsys):
    assert accounting.main(["--vocab_size=65", f"--memory={text}"]) == 2
    assert "39.5GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--gpu=h100-smx", "--vocab_size=65"], "h100-sxm"),
        (["--mfu=1.5", "--vocab_size=65"], "--mfu=1.5"),
        (["--dtype=bfloat16", "--gpu=v100", "--vocab_size=65"], "has no bfloat16"),
        (["--dataset=no-such-corpus"], "data/prepare.py no-such-corpus"),
        (["--n_head=5", "--vocab_size=65"], "n_head=5"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, words, capsys):
    assert accounting.main(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--params=1e9"], "--params and --tokens go together"),
        (["--plan", "--compare"], "--plan and --compare are questions of their own"),
        (["--explain", "--vs=x.py"], "--vs and --explain are questions of their own"),
        (["--n_gpus=8", "--plan"], "--n_gpus does not go with --plan"),
        (["--gpu="], "--gpu="),
        (["--vs="], "cannot be read"),
    ],
)
def test_questions_that_do_not_go_together_are_refused(words, message, capsys):
    assert accounting.main(["--vocab_size=65", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
