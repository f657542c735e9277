"""Command lines: which of several values counts, how flags are written, what is refused, what --help shows."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cli.errors import command, exit_on_mistake
from config import ROOT, Config
from tests.cli.commands import USAGE, Options, changed, given, refused

# --- where settings come from


def test_flags_beat_files_and_later_files_beat_earlier_ones(written):
    first = written("n_layer = 2\nn_head = 2\nn_embd = 64\n", "first.py")
    second = written("n_head = 4\nn_embd = 32\n", "second.py")
    assert changed([]) == {}
    assert changed([first]) == {"n_layer": 2, "n_head": 2, "n_embd": 64}
    assert changed([first, second]) == {"n_layer": 2, "n_head": 4, "n_embd": 32}
    assert changed([second, first]) == {"n_layer": 2, "n_head": 2, "n_embd": 64}
    # wherever the flag stands
    for argv in (["--n_embd=16", first, second], [first, "--n_embd=16", second], [first, second, "--n_embd=16"]):
        assert changed(argv) == {"n_layer": 2, "n_head": 4, "n_embd": 16}
    assert changed(["--n_embd=16", "--n_embd=8"]) == {"n_embd": 8}


@pytest.mark.parametrize("argv", [["--batch_size=8"], ["--batch_size", "8"], ["--batch_size", " 8 "]])
def test_both_forms_of_a_flag(argv):
    assert changed(argv) == {"batch_size": 8}


def test_a_negative_number_and_an_equals_sign_are_values():
    assert changed(["--learning_rate", "-1"]) == {"learning_rate": -1.0}
    assert changed(["--out_dir=lr=3", "--dataset", "a=b"]) == {"out_dir": "lr=3", "dataset": "a=b"}


def test_a_file_may_have_an_equals_sign_in_its_name(written):
    assert changed([written("n_layer = 2", "n_layer=2.py")]) == {"n_layer": 2}


def test_a_commands_own_options_stand_beside_the_settings(written):
    settings, options = given(
        ["--gpu=h200", "--dry", "--n_layer", "2", written("n_head = 2"), "--share=1", "--mode", "slow"], Options
    )
    assert (settings.n_layer, settings.n_head) == (2, 2)
    assert options == Options(gpu="h200", mode="slow", dry=True, share=1.0) and type(options.share) is float
    assert given([], Options)[1] == Options()
    assert given(["--dry=False"], Options)[1].dry is False
    assert refused(["--mode=medium"], Options) == "--mode=medium: mode expects 'fast' or 'slow', got 'medium'"
    assert "unknown setting --gpu" in refused(["--gpu=h200"])
    assert "unknown setting 'gpu'" in refused([written("gpu = 'h200'")], Options)  # files hold settings only


def test_a_text_stays_a_text_whatever_it_looks_like():
    assert changed(["--out_dir=5", "--dataset=None", "--wandb_project='owt'"]) == {
        "out_dir": "5", "dataset": "None", "wandb_project": "'owt'"
    }  # fmt: skip
    for text in ("40", "1e3", "'a'", "[", "3-3"):
        assert given([f"--gpu={text}"], Options)[1].gpu == text
    assert given(["--gpu=None"], Options)[1].gpu is None


def test_an_option_may_be_given_without_a_value_where_it_says_what_that_means():
    assert given(["--limit"], Options)[1].limit == ""
    assert given(["--limit", "--n_layer=2"], Options)[1].limit == ""
    assert given(["--limit=3GB"], Options)[1].limit == given(["--limit", "3GB"], Options)[1].limit == "3GB"
    assert given([], Options)[1].limit is None


def test_a_config_file_is_no_value_of_the_flag_before_it(written):
    settings, options = given(["--limit", written("n_layer = 2")], Options)
    assert (settings.n_layer, options.limit) == (2, "")


# --- what is refused


@pytest.mark.parametrize(
    "argv, message",
    [
        (["batch_size=32"], "argument 'batch_size=32': write --batch_size=32"),
        (["-batch_size=32"], "argument '-batch_size=32': write --batch_size=32"),
        (["-batch_size", "32"], "argument '-batch_size': write --batch_size"),
        (["--bath_size=32"], "unknown setting --bath_size; did you mean batch_size?"),
        (["--batch-size", "32"], "unknown setting --batch-size; did you mean batch_size?"),
        (["--n_layers=3"], "unknown setting --n_layers; did you mean n_layer?"),
        (["--zzz=1"], "unknown setting --zzz; --help lists all settings"),
        (["--"], "unknown setting --; --help lists all settings"),
        (["--batch_size"], "--batch_size needs a value: --batch_size=VALUE"),
        (["--out_dir", "--n_layer=3"], "--out_dir needs a value: --out_dir=VALUE"),
        (["--compile"], "--compile needs a value: --compile=VALUE"),
        (["32"], "32: no such config file; configs/ holds examples"),
    ],
)
def test_malformed_arguments_are_named(argv, message):
    assert refused(argv) == message


def test_a_mistake_is_one_line_on_stderr_and_status_2(capsys):
    assert command(lambda argv: given(argv) and None)(["--n_layers=3"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: unknown setting --n_layers; did you mean n_layer?\n")


def test_an_interrupt_is_one_line_and_status_130(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    assert command(interrupted)([]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_script_exits_at_a_mistake_and_goes_on_without_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command.py", "--n_layer=3"])
    assert exit_on_mistake(given) is None
    monkeypatch.setattr(sys, "argv", ["command.py", "--n_layers=3"])
    with pytest.raises(SystemExit) as exit:
        exit_on_mistake(given)
    assert exit.value.code == 2
    assert capsys.readouterr() == ("", "error: unknown setting --n_layers; did you mean n_layer?\n")


# --- --help


def declarations(cls):
    """Return {name: (type, default, comment)} of a dataclass' fields, each as its source has it."""
    source = Path(sys.modules[cls.__module__].__file__).read_text(encoding="utf-8")
    found = {}
    for name, own in ((name, getattr(cls, name)) for name in cls.__dataclass_fields__):
        (line,) = re.findall(rf"^    {name}: (.*)$", source, re.M)
        kind, _, rest = line.partition(" = ")
        default, _, comment = rest.partition("  # ")
        default = "None" if default.startswith("field(default=None,") else default
        assert eval(default) == own
        found[name] = (kind, default, comment)
    return found


def test_help_lists_every_setting_with_its_default_and_its_comment(capsys):
    with pytest.raises(SystemExit) as exit:
        given(["--n_layer=3", "--help"], Options)
    assert exit.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"usage: {USAGE} [--name=value ...]" and "Do something with a model." in shown
    declared = declarations(Options) | declarations(Config)
    assert {"gpu", "limit", "n_layer", "model", "seed"} < set(declared)
    for name, (kind, default, comment) in declared.items():
        (line,) = (line for line in shown if line.startswith(f"    --{name}="))
        value = line.removeprefix(f"    --{name}=")
        assert value == default or value.startswith(f"{default} ")
        notes = value.removeprefix(default).strip()
        assert notes.startswith(comment)
        choices = ["True", "False"] if kind == "bool" else re.findall(r'"(\w+)"', kind)
        assert not choices or set(choices) - {"auto"} <= set(re.findall(r"\w+", notes)), line
    assert len([line for line in shown if line.startswith("    --")]) == len(declared)
    # what a reader sees of a few of them
    for line in (
        "    --n_layer=12                        L, blocks",
        "    --gradient_accumulation_steps=5 * 8 micro-batches per step, over all ranks",
        '    --norm="layernorm"                  layernorm | rmsnorm',
        "    --bias=False                        in linear layers and layer norms; True | False",
        "    --norm_eps=1e-5",
        "    --gpu=None                          a card",
        "    --dry=False                         touch nothing; True | False",
        "    --limit=None                        how much; bare: only show it",
    ):
        assert line in shown
    own, settings = shown.index("Options of this command:"), shown.index("Settings, also for config files:")
    assert own < shown.index("    --share=0.5") < settings < shown.index("    --norm_eps=1e-5")
    assert shown.index("  data") < shown.index('    --out_dir="out"')  # the sections are headings


@pytest.mark.parametrize("script", ["train.py", "accounting.py", "sample.py", "data/prepare.py", "-m benchmarks"])
def test_help_is_at_once_and_without_torch(script, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    probe = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    assert "torch was imported" in probe.stderr
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *script.split(), "--help"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "") and "--" in done.stdout
    assert not re.search(r"field\(|=\(?$", done.stdout, re.M)  # each default is a value, in its one line
    # seconds of the processor: other processes share the machine
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.5
