"""Checkpoints: a directory per save, tensors as safetensors and the rest as JSON, so that nothing in one can execute.

    out_dir/step_00000500/model.safetensors       weights, by clean names
                          optimizer.safetensors   exp_avg.NAME, exp_avg_sq.NAME, step_count, the loss scale
                          state.json              step, best loss, config, tokenizer, format version
                          manifest.json           size and sha256 of each file; written last, it makes the save valid
    out_dir/latest, out_dir/best                  a directory's name

A save is written under a temporary name, synced, renamed, then pointed to: a kill at any moment leaves the last one.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from config import ConfigError, require

FORMAT = 1
FILES = "model.safetensors", "optimizer.safetensors", "state.json"


def clean(name: str) -> str:
    """Return a parameter's name without what torch.compile and DDP put before it, in any mix."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def save(out_dir: Path, model, optimizer, loss_scale, state: dict, is_best: bool) -> Path:
    """Write a checkpoint, return its directory; keep the last two and the best. `state` is plain JSON with "step"."""
    final = out_dir / f"step_{state['step']:08d}"
    temporary = out_dir / f".{final.name}.tmp"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for leftover in out_dir.glob(".step_*.tmp"):  # of a save that was killed
            shutil.rmtree(leftover)
        temporary.mkdir()
        names = {id(p): clean(name) for name, p in model.named_parameters()}
        save_file({names[id(p)]: p.detach().contiguous() for p in model.parameters()}, temporary / "model.safetensors")
        moments = {
            "step_count": optimizer.step_count,
            "loss_scale": loss_scale.scale,
            "good_steps": loss_scale.good_steps,
        }
        for p, (m, v) in zip(optimizer.parameters, optimizer.state(), strict=True):
            moments |= {f"exp_avg.{names[id(p)]}": m, f"exp_avg_sq.{names[id(p)]}": v}
        save_file(moments, temporary / "optimizer.safetensors")
        write_text(temporary / "state.json", json.dumps({"format": FORMAT} | state, indent=1))
        files = {name: fingerprint(temporary / name) for name in FILES}
        for name in FILES:
            sync(temporary / name)
        write_text(temporary / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
        sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync(out_dir)
        point(out_dir / "latest", final.name)
        if is_best:
            point(out_dir / "best", final.name)
    except (OSError, SafetensorError) as error:  # the latter where the tensors did not fit on the disk
        raise ConfigError(
            f"{final}: the checkpoint could not be written ({error}); earlier ones are untouched"
        ) from None
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
            require(
                file.is_file() and fingerprint(file) == files[name],
                f"{file}: missing or damaged (its manifest says otherwise); use another step_* directory",
            )
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        weights = load_file(directory / "model.safetensors")
        return {"weights": weights, "optimizer": load_file(directory / "optimizer.safetensors"), "state": state}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{directory}: not a checkpoint of this project ({type(error).__name__}: {error})") from None


def locate(path: str | Path) -> Path:
    """Return the checkpoint directory that `path` is, or that its `latest` names."""
    path = Path(path)
    if (path / "manifest.json").is_file():
        return path
    name = pointed(path / "latest")
    if name and (path / name / "manifest.json").is_file():
        return path / name
    raise ConfigError(f"{path}: no checkpoint there; train first, or name an out_dir or one of its step_* directories")


def exists(out_dir: Path) -> bool:
    name = pointed(out_dir / "latest")
    return bool(name) and (out_dir / name / "manifest.json").is_file()


def load_weights(model, weights: dict[str, torch.Tensor]):
    """Copy weights into the model in place; names and shapes that do not agree are listed."""
    own = {clean(name): p for name, p in model.named_parameters()}
    given = {clean(name): tensor for name, tensor in weights.items()}
    wrong = [f"missing {n}" for n in own if n not in given] + [f"unexpected {n}" for n in given if n not in own]
    wrong += [
        f"{n} is {tuple(given[n].shape)}, not {tuple(own[n].shape)}"
        for n in own
        if n in given and given[n].shape != own[n].shape
    ]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    require(not wrong, f"checkpoint and model differ: {'; '.join(wrong[:4])}{more}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(given[name])


def load_optimizer(model, optimizer, loss_scale, moments: dict[str, torch.Tensor]):
    """Copy the optimizer's state in place."""
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    for p, (m, v) in zip(optimizer.parameters, optimizer.state(), strict=True):
        m.copy_(moments[f"exp_avg.{names[id(p)]}"])
        v.copy_(moments[f"exp_avg_sq.{names[id(p)]}"])
    optimizer.step_count.copy_(moments["step_count"])
    loss_scale.scale.copy_(moments["loss_scale"])
    loss_scale.good_steps.copy_(moments["good_steps"])


def pointed(pointer: Path) -> str | None:
    return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else None


def point(pointer: Path, name: str):
    temporary = pointer.with_name(f".{pointer.name}.tmp")
    try:
        write_text(temporary, name + "\n")
        temporary.replace(pointer)
    finally:
        temporary.unlink(missing_ok=True)
    sync(pointer.parent)


def write_text(file: Path, text: str):
    file.write_text(text, encoding="utf-8")
    sync(file)


def sync(path: Path):
    """Wait until a file's or a directory's content is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no directories
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(file: Path) -> dict:
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
