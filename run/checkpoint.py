"""Checkpoints: a directory per save, tensors as safetensors and the rest as JSON, so that nothing in one can execute.

    out_dir/step_00000500/model.safetensors       weights, by clean names
                          optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step_count, the loss scale
                          state.json              step, best loss, config, tokenizer, format version
                          manifest.json           size and sha256 of each file; written last, it makes the save valid
    out_dir/latest, out_dir/best                  a directory's name

A save is written under a temporary name, synced, renamed, then pointed to: a kill at any moment leaves the last one.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cli.errors import ConfigError, require
from cli.files import fingerprint, replace_text, sync, write_text

FORMAT = 1
FILES = "model.safetensors", "optimizer.safetensors", "state.json"


def clean(name: str) -> str:
    """Return a parameter's name without what torch.compile and DDP put before it, in any mix."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def weights_of(model) -> dict[str, Tensor]:
    """Return the model's parameters by their clean names; a tied one comes once."""
    return {clean(name): p.detach() for name, p in model.named_parameters()}


def optimizer_state_of(trainer) -> dict[str, Tensor]:
    """Return what the optimizer and the loss scale remember, by the names of the parameters."""
    optimizer, scale = trainer.optimizer, trainer.loss_scale
    state = {"step_count": optimizer.step_count, "loss_scale": scale.scale, "good_steps": scale.good_steps}
    names = {id(p): clean(name) for name, p in trainer.model.named_parameters()}
    for p, (m, v) in zip(optimizer.parameters, optimizer.state(), strict=True):
        state |= {f"exp_avg.{names[id(p)]}": m, f"exp_avg_sq.{names[id(p)]}": v}
    return state


def save(out_dir: str | Path, trainer, state: dict, is_best: bool) -> Path:
    """Write a checkpoint, return its directory; keep the last two and the best. `state` is plain JSON with "step"."""
    out_dir = Path(out_dir)
    final = out_dir / f"step_{state['step']:08d}"
    temporary = out_dir / f".{final.name}.tmp"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for leftover in out_dir.glob(".step_*.tmp"):  # of a save that was killed
            shutil.rmtree(leftover)
        temporary.mkdir()
        weights = {name: p.contiguous() for name, p in weights_of(trainer.model).items()}
        save_file(weights, temporary / "model.safetensors")
        save_file(optimizer_state_of(trainer), temporary / "optimizer.safetensors")
        write_text(temporary / "state.json", json.dumps({"format": FORMAT} | state, indent=1))
        files = {name: fingerprint(temporary / name) for name in FILES}
        for name in FILES:
            sync(temporary / name)
        write_text(temporary / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
        sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(out_dir)
        for pointer in ("latest", "best") if is_best else ("latest",):
            replace_text(out_dir / pointer, final.name + "\n")
    except (OSError, SafetensorError) as error:  # the latter where the tensors did not fit on the disk
        problem = f"the checkpoint could not be written ({error}); earlier ones are untouched"
        raise ConfigError(f"{final}: {problem}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kept = {pointed(out_dir / "latest"), pointed(out_dir / "best")}
    for old in sorted(path for path in out_dir.iterdir() if re.fullmatch(r"step_\d{8}", path.name))[:-2]:
        if old.name not in kept:
            shutil.rmtree(old)
    return final


def load(path: str | Path) -> dict:
    """Return {"weights", "optimizer", "state"} of a checkpoint directory, or of the latest one in a run's out_dir.

    Tensors arrive on the CPU and nothing else refers to them: once copied into the model they are gone.
    """
    directory = locate(path)
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
        require(version == FORMAT, f"{directory}: checkpoint format {version}, this version reads {FORMAT}")
        for name in FILES:
            file = directory / name
            whole = file.is_file() and fingerprint(file) == files[name]
            require(whole, f"{file}: missing or damaged (its manifest says otherwise); use another step_* directory")
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        weights, optimizer = (load_file(directory / name) for name in FILES[:2])
        return {"weights": weights, "optimizer": optimizer, "state": state}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{directory}: not a checkpoint of this project ({type(error).__name__}: {error})") from None


def locate(path: str | Path) -> Path:
    """Return the checkpoint directory that `path` is, or that its `latest` names."""
    path = Path(path)
    name = pointed(path / "latest")
    for directory in (path, *([path / name] if name else [])):
        if (directory / "manifest.json").is_file():
            return directory
    raise ConfigError(f"{path}: no checkpoint there; train first, or name an out_dir or one of its step_* directories")


def exists(out_dir: str | Path) -> bool:
    name = pointed(Path(out_dir) / "latest")
    return bool(name) and (Path(out_dir) / name / "manifest.json").is_file()


def pointed(pointer: Path) -> str | None:
    return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None


def restore(trainer, saved: dict):
    """Copy a loaded checkpoint into the trainer, and empty `saved`: else it would stay in memory for the whole run."""
    load_weights(trainer.model, saved["weights"])
    for name, tensor in optimizer_state_of(trainer).items():
        tensor.copy_(saved["optimizer"][name])
    saved.clear()


def load_weights(model, weights: dict[str, Tensor]):
    """Copy weights into the model in place; names and shapes that do not agree are listed."""
    own, given = weights_of(model), {clean(name): tensor for name, tensor in weights.items()}
    wrong = [f"missing {n}" for n in own if n not in given] + [f"unexpected {n}" for n in given if n not in own]
    both = [(n, tuple(given[n].shape), tuple(own[n].shape)) for n in own if n in given]
    wrong += [f"{name} is {found}, not {wanted}" for name, found, wanted in both if found != wanted]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    require(not wrong, f"checkpoint and model differ: {'; '.join(wrong[:4])}{more}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(given[name])
