"""Checkpoints: exact, loadable whatever wrapped the model, refused when damaged, never lost to a kill or a full disk.

Nothing in one can execute: tensors are safetensors, everything else is JSON.
"""

import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import weakref

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import checkpoint
from checkpoint import clean, exists, load, load_optimizer, load_weights, save
from config import ROOT, Config, ConfigError, resolve
from hardware import Device
from model import build
from optimizer import AdamW, LossScale, parameter_groups

CONFIG = resolve(
    Config(n_layer=2, n_head=2, n_embd=8, block_size=4, vocab_size=11, bias=True, dtype="float16"),
    Device("a processor", "cpu"),
)


class Wrapper(nn.Module):
    """What DistributedDataParallel does to the names."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": torch.compile,  # wraps at once and compiles at the first call
    "ddp": Wrapper,
    "compiled ddp": lambda model: torch.compile(Wrapper(model)),
    "ddp of compiled": lambda model: Wrapper(torch.compile(model)),
}


def run_of(config=CONFIG, seed=0, steps=0, wrap="plain"):
    """Return (model, optimizer, loss_scale) after some steps on random gradients."""
    model = build(config)
    model.init_weights(seed)
    model = WRAPPERS[wrap](model)
    optimizer = AdamW(parameter_groups(model, 0.1), 1e-2, (0.9, 0.95))
    loss_scale = LossScale(config.dtype, "cpu")
    for step in range(steps):
        one_step(optimizer, loss_scale, seed + step)
    return model, optimizer, loss_scale


def one_step(optimizer, loss_scale, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in optimizer.parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    loss_scale.update(torch.tensor(seed % 3 != 1))  # an overflow now and then


def state_at(step):
    return {
        "step": step, "best_val_loss": 1.25, "config": dataclasses.asdict(CONFIG), "tokenizer": {"kind": "byte"},
    }  # fmt: skip


def tensors_of(model, optimizer, loss_scale):
    """Return every tensor that makes the run what it is, by name."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    tensors = {"step_count": optimizer.step_count, "scale": loss_scale.scale, "good_steps": loss_scale.good_steps}
    for p, (m, v) in zip(optimizer.parameters, optimizer.state(), strict=True):
        tensors |= {names[id(p)]: p.detach(), f"m {names[id(p)]}": m, f"v {names[id(p)]}": v}
    return tensors


def same(ones, others):
    """Return whether the tensors agree bit for bit, dtypes included."""
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype and torch.equal(ones[name], others[name]) for name in ones
    )


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(path):
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- round trip


def test_everything_comes_back_bit_for_bit(tmp_path):
    run = run_of(steps=6)
    assert run[2].scale != LossScale("float16", "cpu").scale and run[2].good_steps > 0
    before = {name: tensor.clone() for name, tensor in tensors_of(*run).items()}
    folder = save(tmp_path, *run, state_at(6), is_best=False)
    assert folder == tmp_path / "step_00000006"
    assert same(tensors_of(*run), before)  # saving changes nothing

    for place in (tmp_path, folder, str(tmp_path)):
        saved = load(place)
        assert saved["state"] == {"format": 1} | state_at(6)
        assert {tensor.device.type for tensor in (saved["weights"] | saved["optimizer"]).values()} == {"cpu"}
        model, optimizer, loss_scale = run_of(seed=99)
        load_weights(model, saved["weights"])
        load_optimizer(model, optimizer, loss_scale, saved["optimizer"])
        assert same(tensors_of(model, optimizer, loss_scale), before)

    for optimizer_, loss_scale_ in (run[1:], (optimizer, loss_scale)):  # and goes on alike
        one_step(optimizer_, loss_scale_, 7)
    assert same(tensors_of(*run), tensors_of(model, optimizer, loss_scale))


def test_the_parameters_stay_the_ones_the_optimizer_steps_on(tmp_path):
    save(tmp_path, *run_of(steps=2), state_at(2), is_best=False)
    model, optimizer, loss_scale = run_of()
    kept = list(map(id, [*model.parameters(), *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count]))
    saved = load(tmp_path)
    load_weights(model, saved["weights"])
    load_optimizer(model, optimizer, loss_scale, saved["optimizer"])
    assert kept == list(map(id, [*model.parameters(), *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.step_count]))
    assert all(p.requires_grad for p in model.parameters())


def test_nothing_refers_to_what_was_loaded(tmp_path):
    """Or the first step after a resume would hold every weight and moment twice, and run out of memory."""
    save(tmp_path, *run_of(steps=2), state_at(2), is_best=False)
    model, optimizer, loss_scale = run_of()
    saved = load(tmp_path)
    tensors = [*saved["weights"].values(), *saved["optimizer"].values()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    references = [weakref.ref(tensor) for tensor in tensors]
    load_weights(model, saved["weights"])
    load_optimizer(model, optimizer, loss_scale, saved["optimizer"])
    del saved, tensors
    assert [reference() for reference in references] == [None] * len(references)  # at once, without the collector
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model, optimizer, loss_scale).values()}
    assert not own & storages


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_are_clean_whatever_wraps_the_model(tmp_path, wrap):
    """Saved from each and loaded into each: plain, compiled, under DDP, and both ways round."""
    plain = run_of(steps=3)
    run = run_of(steps=3, wrap=wrap)
    names = [name for name, _ in run[0].named_parameters()]
    assert (names == [name for name, _ in plain[0].named_parameters()]) == (wrap == "plain")
    save(tmp_path, *run, state_at(3), is_best=False)
    saved = load(tmp_path)
    assert saved["weights"].keys() == {name for name, _ in plain[0].named_parameters()}
    assert saved["optimizer"].keys() == {
        *(f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in saved["weights"]),
        "step_count", "loss_scale", "good_steps",
    }  # fmt: skip
    for other in WRAPPERS:
        loaded = run_of(seed=99, wrap=other)
        load_weights(loaded[0], saved["weights"])
        load_optimizer(*loaded, saved["optimizer"])
        assert same(tensors_of(*loaded), tensors_of(*plain))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_weights_of_others_may_have_prefixes(wrap):
    model, _, _ = run_of(seed=1)
    wrapped, _, _ = run_of(seed=2, wrap=wrap)
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
    save(tmp_path, *run, state_at(0), is_best=False)
    weights = load(tmp_path)["weights"]
    tables = [name for name, tensor in weights.items() if tensor.shape == (11, 8)]
    assert tables == (["wte"] if tie_weights else ["head", "wte"])
    assert sum(tensor.numel() for tensor in weights.values()) == sum(p.numel() for p in run[0].parameters())


# --- what a checkpoint is made of


def test_files_are_safetensors_and_json(tmp_path):
    folder = save(tmp_path, *run_of(steps=1), state_at(1), is_best=True)
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
    sources = [path for path in [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py")]]
    assert ROOT / "checkpoint.py" in sources and ROOT / "data" / "loader.py" in sources
    for path in sources:
        found = re.search(r"torch\.(load|save)\b|pickle|marshal|shelve|joblib", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found[0]}"


def test_the_last_two_and_the_best_are_kept(tmp_path):
    run = run_of()
    kept = []
    for step in (10, 20, 30, 40, 50, 60):
        save(tmp_path, *run, state_at(step), is_best=step in (20, 50))
        assert load(tmp_path)["state"]["step"] == step
        kept.append(sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*")))
    assert kept == [[10], [10, 20], [20, 30], [20, 30, 40], [40, 50], [50, 60]]
    assert (tmp_path / "best").read_text(encoding="utf-8").strip() == "step_00000050"
    assert load(tmp_path / "step_00000050")["state"]["step"] == 50


def test_exists(tmp_path):
    assert not exists(tmp_path) and not exists(tmp_path / "missing")
    folder = save(tmp_path, *run_of(), state_at(1), is_best=False)
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
    earlier = save(tmp_path, *run, state_at(1), is_best=False)
    folder = save(tmp_path, *run, state_at(2), is_best=False)
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
    folder = save(tmp_path, *run_of(), state_at(1), is_best=False)
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
    folder = save(tmp_path, *run_of(), state_at(1), is_best=False)
    (folder / "manifest.json").unlink()
    is_none(tmp_path)
    is_none(folder)


# --- weights of another model


def test_weights_that_do_not_fit_are_listed():
    weights = dict(run_of()[0].named_parameters())
    model, _, _ = run_of(seed=1)
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


# --- failing writes


def disk_is_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(function, n, failure):
    """Return the function, whose n-th call from now fails."""
    calls = itertools.count()
    return lambda *args, **kwargs: (failure if next(calls) == n else function)(*args, **kwargs)


def save_fails(out_dir, is_best=True):
    """Save step 2 after step 1, in vain, and check what was promised; return the step that is the latest now."""
    run = run_of()
    earlier = save(out_dir, *run, state_at(1), is_best=True)
    before = contents(earlier)
    yield
    with pytest.raises(ConfigError) as caught:
        save(out_dir, *run, state_at(2), is_best)
    message = str(caught.value)
    assert message.startswith(f"{out_dir / 'step_00000002'}: the checkpoint could not be written (")
    assert message.endswith("); earlier ones are untouched") and "\n" not in message
    assert contents(earlier) == before
    assert not [path for path in out_dir.iterdir() if path.name.startswith(".")]
    yield load(out_dir)["state"]["step"]


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("kind", ["OSError", "SafetensorError"])
def test_tensors_that_cannot_be_written(tmp_path, monkeypatch, n, kind):
    def failure(*_):
        if kind == "SafetensorError":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        disk_is_full()

    attempt = save_fails(tmp_path)
    next(attempt)
    monkeypatch.setattr(checkpoint, "save_file", failing_at(checkpoint.save_file, n, failure))
    assert next(attempt) == 1
    assert not (tmp_path / "step_00000002").exists()


def test_a_disk_that_is_full_at_any_sync(tmp_path, monkeypatch):
    fsync, steps = os.fsync, []
    for n in range(100):
        out_dir = tmp_path / str(n)
        attempt = save_fails(out_dir)
        next(attempt)
        calls = failing_at(fsync, n, disk_is_full)
        monkeypatch.setattr(os, "fsync", calls)
        try:
            steps.append(next(attempt))
        except pytest.fail.Exception:  # the save needed fewer syncs: all were tried
            break
        finally:
            monkeypatch.setattr(os, "fsync", fsync)
    assert len(steps) >= 8  # four files, the folder, its parent, the pointers
    assert steps == sorted(steps) and steps[:7] == [1] * 7


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_file_that_the_system_lets_grow_no_further(tmp_path, name):
    """The system's own refusal, a byte before the end: safetensors wraps it in an error of its own."""
    attempt = save_fails(tmp_path)
    next(attempt)
    limit = (tmp_path / "step_00000001" / name).stat().st_size - 1
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, earlier[1]))
    try:
        assert next(attempt) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def test_an_out_dir_that_is_a_file(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="the checkpoint could not be written"):
        save(tmp_path / "out", *run_of(), state_at(1), is_best=False)


def test_an_interrupted_save_leaves_no_temporary(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save(tmp_path, *run_of(), state_at(1), is_best=False)
    monkeypatch.setattr(checkpoint, "save_file", failing_at(checkpoint.save_file, 1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, *run_of(), state_at(2), is_best=False)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "latest"}


# --- kills


def filled(run, value):
    """Let every tensor of the run hold one value, so that a mixture of two saves shows."""
    for tensor in tensors_of(*run).values():
        with torch.no_grad():
            tensor.fill_(value)
    return run


def whole(path):
    """Return the step of a checkpoint, having checked that every tensor is that step's."""
    saved = load(path)
    step = saved["state"]["step"]
    for tensor in (saved["weights"] | saved["optimizer"]).values():
        assert (tensor == step).all()
    return step


def best_of(out_dir):
    return out_dir / (out_dir / "best").read_text(encoding="utf-8").strip()


def in_a_process(function, *args):
    """Run function(*args) in a fresh process, which may fork: no thread of torch's is alive there yet."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, "its error is on stderr"


def forked(function, *args):
    """Start function(*args) in a fork and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def save_until_killed(out_dir, first_step):
    run = run_of()
    for step in itertools.count(first_step):
        save(out_dir, *filled(run, step), state_at(step), is_best=step % 3 == 0)


def kill_at_random_moments(out_dir):
    moments, step = random.Random(0), 0
    for _ in range(12):
        child = forked(save_until_killed, out_dir, step + 1)
        deadline = time.monotonic() + 10
        while not (out_dir / f"step_{step + 1:08d}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL  # it had not ended by an error of its own
        if (out_dir / "best").exists():
            whole(best_of(out_dir))
        reached = whole(out_dir) if exists(out_dir) else 0
        assert reached >= step
        step = reached
    assert step > 12


def test_a_kill_at_a_random_moment_leaves_a_whole_latest_checkpoint(tmp_path):
    in_a_process(kill_at_random_moments, tmp_path / "out")


def save_and_be_killed(out_dir, n):
    """Save step 4, and be killed at the n-th thing that is done to a file."""
    run, events = filled(run_of(), 4), itertools.count()

    def hook(event, _):
        of_files = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
        if of_files and next(events) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(out_dir, *run, state_at(4), is_best=True)


def kill_at_every_event(folder):
    os.fsync = lambda _: None  # a kill, unlike a power cut, loses nothing that was written
    run, reached, leftovers = run_of(), [], 0
    for step in (1, 2, 3):
        save(folder / "before", *filled(run, step), state_at(step), is_best=step == 1)
    for n in range(200):
        out_dir = shutil.copytree(folder / "before", folder / str(n))
        ended = os.waitpid(forked(save_and_be_killed, out_dir, n), 0)[1]
        reached.append(whole(out_dir))
        assert whole(best_of(out_dir)) in (1, 4)
        leftovers += any(out_dir.glob(".step_*.tmp"))
        save(
            out_dir, *filled(run, 5), state_at(5), is_best=False
        )  # goes well, and takes away what is left of the other
        assert whole(out_dir) == 5 and not any(out_dir.glob(".step_*.tmp"))
        if ended != signal.SIGKILL:
            break
    assert ended == 0 and reached[-1] == 4  # the last one came through
    assert reached == sorted(reached) and reached.count(3) > 10 and reached.count(4) > 3 and leftovers > 5


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_latest_checkpoint(tmp_path):
    """At each in turn, until a save comes through."""
    in_a_process(kill_at_every_event, tmp_path)
