"""Sampling: from a checkpoint directory alone, reproducibly, with every prompt and option a user may give."""

import base64
import dataclasses
import io
import json
import re
import shutil
import types

import pytest
import torch

import sample
from config import Config, resolve
from data.tokenizer import Tokenizer
from hardware.spec import DeviceSpec
from model import LanguageModel, build
from optimizer import AdamW, LossScale, parameter_groups
from run import checkpoint

CHARS = "".join(map(chr, range(48, 48 + 65)))  # "0" to "p": each is one byte
CHAR = {"kind": "char", "chars": CHARS}
BYTE = {"kind": "byte"}


def save(out_dir, model, state):
    """Save a model as training does, with an optimizer that has not stepped yet."""
    optimizer = AdamW(parameter_groups(model, 0.1), 1e-3, (0.9, 0.95))
    trainer = types.SimpleNamespace(model=model, optimizer=optimizer, loss_scale=LossScale("float32", "cpu"))
    checkpoint.save(out_dir, trainer, state, is_best=True)


@pytest.fixture
def trained(tmp_path):
    """Return a function that saves a model of random but opinionated weights, and returns (its folder, the model)."""

    def trained(tokenizer=CHAR, best=1.25, **settings):
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 65, "tie_weights": False}
        config = Config(**shape | {"dtype": "float32", "init": "gpt2", "dataset": str(tmp_path / "gone")} | settings)
        config = resolve(config, DeviceSpec("a test", "cpu"))
        model = build(config)
        model.init_weights(seed=0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(15 if p.dim() == 2 else 1)  # then neither one token nor all of them are likely
        state = {"step": 7, "best_val_loss": best, "config": dataclasses.asdict(config), "tokenizer": tokenizer}
        save(tmp_path / "out", model, state)
        return tmp_path / "out", model.eval()

    return trained


@pytest.fixture
def speak(capsys):
    """Return a function that samples and returns (stdout, stderr), having checked the exit status.

    A mistake's one line is returned alone. The folder may be None, where an option names it.
    """

    def speak(folder, *words, status=0, **options):
        options = {"device": "cpu"} | options
        words = [*([] if folder is None else [str(folder)]), *map(str, words)]
        found = sample.main([*words, *(f"--{name}={value}" for name, value in options.items())])
        printed = capsys.readouterr()
        assert found == status, printed.out + printed.err
        if status == 2:
            assert printed.out == ""
            assert len(printed.err.splitlines()) == 1 and printed.err.startswith("error: ")
            return printed.err
        return printed.out, printed.err

    return speak


def script(monkeypatch, ids, watch=lambda: None):
    """Let the model say these ids, whatever it is asked; `watch` is called before each."""

    def generate(self, idx, n_tokens, *args):
        for i in ids[:n_tokens]:
            watch()
            yield torch.tensor([i])

    monkeypatch.setattr(LanguageModel, "generate", generate)


# --- what comes out


@pytest.mark.parametrize("kind", ["transformer", "mlp"])
def test_greedy_takes_the_likeliest_token_each_time(trained, speak, kind):
    folder, model = trained(model=kind, block_size=32)
    text, _ = speak(folder, prompt="Hello", max_new_tokens=20, temperature=0)
    ids = Tokenizer(CHAR).encode("Hello")
    with torch.no_grad():
        for _ in range(20):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert text == Tokenizer(CHAR).decode(ids) + "\n"
    assert len(set(text)) > 6
    for same in ({"seed": 5}, {"top_k": None}, {"top_p": 0.5}):
        assert speak(folder, prompt="Hello", max_new_tokens=20, temperature=0, **same)[0] == text


def test_a_checkpoint_directory_is_all_it_needs(trained, speak, tmp_path, monkeypatch):
    folder, _ = trained()
    expected, _ = speak(folder, prompt="A", max_new_tokens=9)
    shutil.copytree(folder / "step_00000007", tmp_path / "elsewhere" / "model")
    shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert speak("model", prompt="A", max_new_tokens=9)[0] == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere"]  # neither the data nor the run is there


def test_the_seed_is_samplings_own(trained, speak):
    folder, _ = trained(seed=99)
    texts = [speak(folder, prompt="Hello", max_new_tokens=40, seed=seed)[0] for seed in (1337, 1337, 1338)]
    assert texts[0] == texts[1] != texts[2]
    assert speak(folder, prompt="Hello", max_new_tokens=40)[0] == texts[0]  # the default, not training's 99
    two, _ = speak(folder, prompt="Hello", max_new_tokens=40, num_samples=2)
    first, second = two.split("\n---------------\n")
    assert first == texts[0] and second.startswith("Hello") and second != texts[0]


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-8}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}]
)
def test_options_that_leave_one_choice_are_greedy(trained, speak, options):
    folder, _ = trained()
    greedy, _ = speak(folder, prompt="Hi", max_new_tokens=30, temperature=0)
    assert speak(folder, prompt="Hi", max_new_tokens=30, **options)[0] == greedy
    assert speak(folder, prompt="Hi", max_new_tokens=30, temperature=1.0)[0] != greedy


def test_top_k_may_exceed_the_vocabulary(trained, speak):
    folder, _ = trained()
    every, _ = speak(folder, prompt="Hi", max_new_tokens=30, top_k=None)
    assert speak(folder, prompt="Hi", max_new_tokens=30, top_k=200)[0] == every
    assert speak(folder, prompt="Hi", max_new_tokens=30, top_p=1.0)[0] == every


def test_prompt_and_text_may_outgrow_the_context(trained, speak):
    folder, _ = trained()
    prompt = CHARS[:50]
    text, _ = speak(folder, prompt=prompt, max_new_tokens=40)
    assert text.startswith(prompt) and len(text) == 50 + 40 + 1


# --- prompts


def test_a_prompt_from_stdin_is_the_same_prompt(trained, speak, monkeypatch):
    folder, _ = trained()
    expected, _ = speak(folder, prompt="Hello", max_new_tokens=9)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert speak(folder, prompt="-", max_new_tokens=9)[0] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert "the prompt in stdin is not utf-8 at byte 2; convert it" in speak(folder, prompt="-", status=2)


def test_out_dir_and_start_are_other_names_of_the_folder_and_the_prompt(trained, speak, tmp_path):
    folder, _ = trained()
    expected, _ = speak(folder, prompt="Hello", max_new_tokens=9)
    assert expected.startswith("Hello") and len(expected) == len("Hello") + 9 + 1
    assert speak(None, out_dir=folder, start="Hello", max_new_tokens=9)[0] == expected
    assert speak(None, "--out_dir", folder, "--start", "Hello", max_new_tokens=9)[0] == expected
    (tmp_path / "prompt.txt").write_text("Hello", encoding="utf-8")
    for name in ("start", "prompt"):
        file = {name: f"FILE:{tmp_path / 'prompt.txt'}"}
        assert speak(None, out_dir=folder, max_new_tokens=9, **file)[0] == expected
        assert speak(folder, max_new_tokens=9, **file)[0] == expected


def test_a_prompt_file_is_looked_for_where_the_command_is_typed(trained, speak, tmp_path, monkeypatch):
    folder, _ = trained(tokenizer=BYTE, vocab_size=257)
    expected, _ = speak(folder, prompt="aé字🙂\n", max_new_tokens=3)
    (tmp_path / "prompt.txt").write_bytes("aé字🙂\n".encode())
    monkeypatch.chdir(tmp_path)
    assert speak(folder, start="FILE:prompt.txt", max_new_tokens=3)[0] == expected
    (tmp_path / "empty.txt").touch()
    assert speak(folder, start="FILE:empty.txt", max_new_tokens=3)[0] == speak(folder, max_new_tokens=3)[0]


def test_a_prompt_file_that_cannot_be_read(trained, speak, tmp_path):
    folder, _ = trained()
    missing, folder_there, latin = tmp_path / "missing.txt", tmp_path / "prompts", tmp_path / "latin.txt"
    folder_there.mkdir()
    latin.write_bytes("café".encode("latin-1"))
    for name in ("start", "prompt"):
        error = speak(folder, status=2, **{name: f"FILE:{missing}"})
        assert f"{missing}: the prompt cannot be read (No such file or directory); --prompt=TEXT gives it here" in error
        error = speak(folder, status=2, **{name: f"FILE:{folder_there}"})
        assert f"{folder_there}: the prompt cannot be read (Is a directory)" in error
        error = speak(folder, status=2, **{name: f"FILE:{latin}"})
        assert f"the prompt in {latin} is not utf-8 at byte 3; convert it" in error


def test_characters_outside_the_vocabulary_are_named(trained, speak):
    folder, _ = trained()
    error = speak(folder, prompt="Hello, World!", status=2)
    assert "the char vocabulary of 65 characters lacks ' ' '!' ','" in error


def test_without_a_prompt_it_starts_from_an_end_of_text_that_is_not_printed(trained, speak, monkeypatch):
    seen = []
    generate = LanguageModel.generate

    def watched(self, idx, *args):
        seen.append(idx.tolist())
        return generate(self, idx, *args)

    monkeypatch.setattr(LanguageModel, "generate", watched)
    folder, _ = trained(tokenizer=BYTE, vocab_size=257)
    text, _ = speak(folder, max_new_tokens=5)
    assert speak(folder, prompt="", max_new_tokens=5)[0] == text
    assert seen == [[[256]], [[256]]] and "<|endoftext|>" not in text
    folder, _ = trained()  # no end of text in this vocabulary
    text, _ = speak(folder, max_new_tokens=5)
    assert seen[2:] == [[[0]]] and len(text) == 5 + 1


def test_a_prompt_that_the_model_has_no_row_for(trained, speak):
    folder, _ = trained(vocab_size=60)
    assert "the prompt has id 64, but the model's vocab_size is 60" in speak(folder, prompt="p", status=2)


# --- the vocabulary


def test_ids_that_pad_a_vocabulary_are_silent(trained, speak):
    folder, _ = trained(vocab_size=128)
    text, said = speak(folder, prompt="A", max_new_tokens=300, temperature=3, top_k=None)
    assert 0 < len(text) - 2 < 300 and set(text) <= set(CHARS + "\n")
    assert "300 tokens" in said


def test_ids_that_a_vocabulary_leaves_out_are_silent(trained, speak, monkeypatch):
    tokens = [base64.b64encode(bytes([i])).decode() if i != 66 else None for i in range(256)]
    definition = {"kind": "tiktoken", "name": "holed", "pat_str": "(?s).", "mergeable_ranks": tokens}
    folder, _ = trained(tokenizer=definition | {"special_tokens": {}}, vocab_size=256)
    script(monkeypatch, [65, 66, 67])
    assert speak(folder, prompt="x")[0] == "xAC\n"


def test_a_text_ends_where_the_model_ends_it(trained, speak, monkeypatch):
    folder, _ = trained(tokenizer=BYTE, vocab_size=257)
    script(monkeypatch, [65, 256, 66])
    text, said = speak(folder, prompt="x", num_samples=2)
    assert text == "xA\n\n---------------\nxA\n" and said.splitlines()[-1].startswith("4 tokens, ")


def test_half_a_character_before_the_end_of_a_text_is_marked(trained, speak, monkeypatch):
    folder, _ = trained(tokenizer=BYTE, vocab_size=257)
    script(monkeypatch, [65, 0xE5, 256, 66])
    assert speak(folder, prompt="x")[0] == "xA\N{REPLACEMENT CHARACTER}\n"


def test_characters_of_several_bytes_appear_whole_and_as_they_come(trained, speak, monkeypatch):
    folder, _ = trained(tokenizer=BYTE, vocab_size=257)
    written, seen = [], []

    class Screen(io.StringIO):
        def write(self, text):
            written.append(text)
            return len(text)

    monkeypatch.setattr("sys.stdout", Screen())
    script(monkeypatch, [*"aé字🙂".encode(), 0xE5], watch=lambda: seen.append("".join(written)))
    assert sample.main([str(folder), "--device=cpu", "--prompt=>"]) == 0
    steps = [">", ">a", ">a", ">aé", ">aé", ">aé", ">aé字", ">aé字", ">aé字", ">aé字", ">aé字🙂"]
    assert seen == steps  # what stood there before each of the eleven bytes
    assert "".join(written) == ">aé字🙂\N{REPLACEMENT CHARACTER}\n"  # the last one remained half a character


# --- what is said beside the text


def test_the_model_is_described_and_its_speed_told(trained, speak):
    folder, model = trained()
    _, said = speak(folder, prompt="A", max_new_tokens=12)
    about, speed = said.splitlines()
    n_params = sum(p.numel() for p in model.parameters())
    assert about == f"step 7, best validation loss 1.2500 (random is ln V = 4.17), {n_params:,} parameters"
    found = re.fullmatch(r"12 tokens, ([\d,]+\.\d) tokens/s", speed)
    assert found and float(found[1].replace(",", "")) > 0
    folder, _ = trained(best=None)
    assert "step 7, not evaluated yet (random" in speak(folder, prompt="A", max_new_tokens=1)[1]


def test_another_dtype_than_trainings(trained, speak):
    folder, _ = trained()
    text, _ = speak(folder, prompt="A", max_new_tokens=5, dtype="bfloat16")
    assert text.startswith("A") and len(text) == 5 + 2


# --- a user's mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "--temperature=-0.5 must not be negative; 0 always takes the likeliest token"),
        ({"top_k": 0}, "--top_k=0 must be at least 1, or None"),
        ({"top_p": 0}, "--top_p=0.0 must lie in (0, 1], or be None"),
        ({"top_p": 1.5}, "--top_p=1.5 must lie in (0, 1], or be None"),
        ({"max_new_tokens": 0}, "--max_new_tokens and --num_samples must be at least 1"),
        ({"num_samples": 0}, "--max_new_tokens and --num_samples must be at least 1"),
        ({"device": "nonsense"}, "device='nonsense': not a device"),
        ({"device": "cuda"}, "device='cuda': this torch sees no CUDA device"),
        ({"temprature": 1}, "unknown setting --temprature; did you mean temperature?"),
    ],
)
def test_a_mistake_is_answered_in_one_line(trained, speak, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder, _ = trained()
    assert message in speak(folder, status=2, **options)


def test_the_folder_is_wanted_once(trained, speak):
    folder, _ = trained()
    wanted = "name one run's folder, as in python sample.py out; got"
    assert f"{wanted} {folder} another" in speak(folder, "another", status=2)
    assert f"{wanted} {folder} another" in speak(folder, out_dir="another", status=2)
    assert f"{wanted} {folder} {folder}" in speak(folder, out_dir=folder, status=2)
    assert f"{wanted} none" in speak(None, status=2)


def test_the_prompt_is_wanted_once(trained, speak):
    folder, _ = trained()
    for text in ("A", "B", ""):
        error = speak(folder, prompt="A", start=text, status=2)
        assert error == "error: --prompt and --start are two names of one option: use one of them\n"


def test_a_folder_without_a_checkpoint(speak, tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert f"{folder}: no checkpoint there; train first, or name an out_dir" in speak(folder, status=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("config"), "its state.json is not of this project: no config"),
        (lambda state: state.pop("tokenizer"), "its state.json is not of this project"),
        (
            lambda state: state["config"].update(n_expert=8),
            "trained with settings this version does not know: n_expert",
        ),
        (lambda state: state["config"].update(n_layer=3), "checkpoint and model differ: missing blocks.2"),
        (lambda state: state.update(tokenizer={"kind": "runes"}), "this is not a tokenizer's definition"),
    ],
)
def test_a_foreign_checkpoint(trained, speak, tmp_path, change, message):
    folder, model = trained()
    state = checkpoint.load(folder)["state"]
    change(state)
    save(tmp_path / "foreign", model, state)
    assert message in speak(tmp_path / "foreign", status=2)


def test_a_damaged_checkpoint(trained, speak):
    folder, _ = trained()
    file = folder / "step_00000007" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"step": 9}), encoding="utf-8")
    assert "state.json: missing or damaged (its manifest says otherwise)" in speak(folder, status=2)
