"""Writing files so that no reader ever sees half of one, and no power cut destroys one."""

import hashlib
import os
from pathlib import Path


def replace_text(path: Path, text: str):
    """Replace a file: write the text under a temporary name, sync it to the disk, and rename it over the old file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_text(temporary, text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str):
    path.write_text(text, encoding="utf-8")
    sync(path)


def sync(path: Path):
    """Wait until the content of a file or directory is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open directories
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(path: Path) -> dict:
    """Return the size and the sha256 of a file, in the form of a manifest entry."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
