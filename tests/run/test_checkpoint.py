"""Checkpoints: exact, loadable whatever wrapped the model, refused when damaged.

Nothing in one can execute: tensors are safetensors, everything else is JSON.
"""

import dataclasses
import json
import re
import shutil
import weakref

import pytest
import torch
from safetensors import safe_open

from cli.errors import ConfigError
from config import ROOT
from optimizer import LossScale
from run.checkpoint import clean, exists, load, load_weights, restore, save
from tests.run.small_runs import CONFIG, WRAPPERS, contents, one_step, run_of, same, state_at, tensors_of


def refused(path):
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- round trip


def test_everything_comes_back_bit_for_bit(tmp_path):
    run = run_of(steps=6)
    assert run.loss_scale.scale != LossScale("float16", "cpu").scale and run.loss_scale.good_steps > 0
    before = {name: tensor.clone() for name, tensor in tensors_of(run).items()}
    folder = save(tmp_path, run, state_at(6), is_best=False)
    assert folder == tmp_path / "step_00000006"
    assert same(tensors_of(run), before)  # saving changes nothing

    for place in (tmp_path, folder, str(tmp_path)):
        saved = load(place)
        assert saved["state"] == {"format": 1} | state_at(6)
        assert {tensor.device.type for tensor in (saved["weights"] | saved["optimizer"]).values()} == {"cpu"}
        restored = run_of(seed=99)
        restore(restored, saved)
        assert same(tensors_of(restored), before)

    for either in (run, restored):  # both continue alike
        one_step(either, 7)
    assert same(tensors_of(run), tensors_of(restored))


def test_the_parameters_stay_the_ones_the_optimizer_steps_on(tmp_path):
    save(tmp_path, run_of(steps=2), state_at(2), is_best=False)
    run = run_of()

    def tensors():
        o = run.optimizer
        return list(map(id, [*run.model.parameters(), *o.exp_avg, *o.exp_avg_sq, o.step_count]))

    kept = tensors()
    restore(run, load(tmp_path))
    assert kept == tensors()
    assert all(p.requires_grad for p in run.model.parameters())


def test_nothing_refers_to_what_was_loaded(tmp_path):
    """Otherwise a resumed run would hold every weight and moment twice, and run out of memory."""
    save(tmp_path, run_of(steps=2), state_at(2), is_best=False)
    run = run_of()
    saved = load(tmp_path)
    tensors = [*saved["weights"].values(), *saved["optimizer"].values()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    references = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    restore(run, saved)
    assert saved == {}  # the caller's own name for it holds nothing any more
    assert [reference() for reference in references] == [None] * len(references)  # at once, without the collector
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(run).values()}
    assert not own & storages


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_are_clean_whatever_wraps_the_model(tmp_path, wrap):
    """A checkpoint of each loads into each: plain, compiled, under DDP, and both ways round."""
    plain = run_of(steps=3)
    run = run_of(steps=3, wrap=wrap)
    names = [name for name, _ in run.model.named_parameters()]
    assert (names == [name for name, _ in plain.model.named_parameters()]) == (wrap == "plain")
    save(tmp_path, run, state_at(3), is_best=False)
    saved = load(tmp_path)
    assert saved["weights"].keys() == {name for name, _ in plain.model.named_parameters()}
    assert saved["optimizer"].keys() == {
        *(f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in saved["weights"]),
        "step_count", "loss_scale", "good_steps",
    }  # fmt: skip
    for other in WRAPPERS:
        loaded = run_of(seed=99, wrap=other)
        restore(loaded, load(tmp_path))
        assert same(tensors_of(loaded), tensors_of(plain))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_weights_of_others_may_have_prefixes(wrap):
    model = run_of(seed=1).model
    wrapped = run_of(seed=2, wrap=wrap).model
    load_weights(model, dict(wrapped.named_parameters()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), wrapped.parameters(), strict=True))


@pytest.mark.parametrize(
    "name, cleaned",
    [
        ("wte", "wte"), ("_orig_mod.wte", "wte"), ("module.wte", "wte"), ("module._orig_mod.wte", "wte"),
        ("_orig_mod.module.wte", "wte"), ("blocks.0._orig_mod.norm1.weight", "blocks.0.norm1.weight"),
        ("module.blocks.1._orig_mod.mlp.up.weight", "blocks.1.mlp.up.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
    ],
)  # fmt: skip
def test_clean(name, cleaned):
    assert clean(name) == cleaned


@pytest.mark.parametrize("tie_weights", [True, False])
def test_a_tied_head_is_stored_once(tmp_path, tie_weights):
    config = dataclasses.replace(CONFIG, tie_weights=tie_weights)
    run = run_of(config)
    save(tmp_path, run, state_at(0), is_best=False)
    weights = load(tmp_path)["weights"]
    tables = [name for name, tensor in weights.items() if tensor.shape == (11, 8)]
    assert tables == (["wte"] if tie_weights else ["head", "wte"])
    assert sum(tensor.numel() for tensor in weights.values()) == sum(p.numel() for p in run.model.parameters())


# --- what a checkpoint is made of


def test_files_are_safetensors_and_json(tmp_path):
    folder = save(tmp_path, run_of(steps=1), state_at(1), is_best=True)
    assert contents(tmp_path).keys() == {
        "latest", "best", *(f"step_00000001/{name}" for name in (
            "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json",
        )),
    }  # fmt: skip
    for name in ("model", "optimizer"):
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            assert file.keys()
    assert json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"] == 1
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    }


def test_nothing_in_the_project_unpickles():
    packages = [file.parent for file in ROOT.glob("*/__init__.py") if file.parent.name != "tests"]
    sources = [path for folder in [ROOT, *packages] for path in folder.glob("*.py")]
    assert {ROOT / "train.py", ROOT / "run" / "checkpoint.py", ROOT / "data" / "loader.py"} <= set(sources)
    for path in sources:
        text = path.read_text(encoding="utf-8")
        if path == ROOT / "benchmarks" / "learning.py":  # which reads the weights that nanoGPT has just written
            text = text.replace('torch.load(f"{out}/ckpt.pt", weights_only=True)', "")
        found = re.search(r"torch\.(load|save)\b|pickle|marshal|shelve|joblib", text)
        assert not found, f"{path}: {found[0]}"


def test_the_last_two_and_the_best_are_kept(tmp_path):
    run = run_of()
    kept = []
    for step in (10, 20, 30, 40, 50, 60):
        save(tmp_path, run, state_at(step), is_best=step in (20, 50))
        assert load(tmp_path)["state"]["step"] == step
        kept.append(sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*")))
    assert kept == [[10], [10, 20], [20, 30], [20, 30, 40], [40, 50], [50, 60]]
    assert (tmp_path / "best").read_text(encoding="utf-8").strip() == "step_00000050"
    assert load(tmp_path / "step_00000050")["state"]["step"] == 50


def test_exists(tmp_path):
    assert not exists(tmp_path) and not exists(tmp_path / "missing")
    folder = save(tmp_path, run_of(), state_at(1), is_best=False)
    assert exists(tmp_path)
    shutil.rmtree(folder)
    assert not exists(tmp_path)


# --- damage


def edit(change):
    """Return a function that changes a file's JSON."""

    def edited(file):
        value = json.loads(file.read_text(encoding="utf-8"))
        change(value)
        file.write_text(json.dumps(value), encoding="utf-8")

    return edited


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    """Flip the lowest bit in the middle: the size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut, flip, lambda file: file.write_bytes(b""), lambda file: file.unlink()])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    run = run_of()
    earlier = save(tmp_path, run, state_at(1), is_best=False)
    folder = save(tmp_path, run, state_at(2), is_best=False)
    damage(folder / name)
    assert refused(tmp_path) == (
        f"{folder / name}: missing or damaged (its manifest says otherwise); use another step_* directory"
    )
    assert load(earlier)["state"]["step"] == 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut, "not a checkpoint of this project (JSONDecodeError"),
        (lambda file: file.write_text("[]"), "not a checkpoint of this project (TypeError"),
        (lambda file: file.write_text("{}"), "not a checkpoint of this project (KeyError: 'format')"),
        (lambda file: file.write_text('{"name": "another", "version": 3}'), "not a checkpoint of this project"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "not a checkpoint of this project (UnicodeDecodeError"),
        (edit(lambda m: m.update(format=2)), "checkpoint format 2, this version reads 1"),
        (edit(lambda m: m.update(format="1")), "checkpoint format 1, this version reads 1"),
        (edit(lambda m: m.update(files=[])), "not a checkpoint of this project (TypeError"),
        (edit(lambda m: m["files"].clear()), "not a checkpoint of this project (KeyError: 'model.safetensors')"),
        (edit(lambda m: m["files"].pop("optimizer.safetensors")), "not a checkpoint of this project (KeyError"),
    ],
)
def test_a_damaged_or_foreign_manifest(tmp_path, damage, message):
    folder = save(tmp_path, run_of(), state_at(1), is_best=False)
    damage(folder / "manifest.json")
    assert refused(tmp_path).startswith(f"{folder}: {message}")
    assert refused(folder).startswith(f"{folder}: {message}")


def test_what_is_no_checkpoint(tmp_path):
    def is_none(path):
        assert refused(path) == (
            f"{path}: no checkpoint there; train first, or name an out_dir or one of its step_* directories"
        )

    is_none(tmp_path)
    is_none(tmp_path / "missing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"foreign")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    is_none(tmp_path)
    is_none(tmp_path / "config.json")
    for pointer in (b"", b"step_00000009\n", b"\0\0\0\0", b"\xff\xfe", b"..\n"):
        (tmp_path / "latest").write_bytes(pointer)
        is_none(tmp_path)
    folder = save(tmp_path, run_of(), state_at(1), is_best=False)
    (folder / "manifest.json").unlink()
    is_none(tmp_path)
    is_none(folder)


# --- weights of another model


def test_weights_that_do_not_fit_are_listed():
    weights = dict(run_of().model.named_parameters())
    model = run_of(seed=1).model
    before = [p.clone() for p in model.parameters()]

    def listed(weights):
        with pytest.raises(ConfigError) as caught:
            load_weights(model, weights)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))  # none was copied
        return str(caught.value)

    assert listed({name: p for name, p in weights.items() if name != "wpe"}) == (
        "checkpoint and model differ: missing wpe"
    )
    assert listed(weights | {"module.head": torch.zeros(2)}) == "checkpoint and model differ: unexpected head"
    assert listed(weights | {"wte": torch.zeros(12, 8), "norm.bias": torch.zeros(1)}) == (
        "checkpoint and model differ: wte is (12, 8), not (11, 8); norm.bias is (1,), not (8,)"
    )
    assert listed({"other": torch.zeros(1)}) == (
        f"checkpoint and model differ: missing wte; missing wpe; missing blocks.0.norm1.weight; "
        f"missing blocks.0.norm1.bias and {len(weights) + 1 - 4} more"
    )
