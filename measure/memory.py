"""The memory of this process, and how its allocator is set up."""

import contextlib
import ctypes
import gc
import os
import re
import sys
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def tune_allocator():
    """Have glibc's allocator keep what is freed for the next step, instead of giving it back to the system.

    By default each step has its memory mapped and zeroed anew, page by page: a tenth of a small model's step, and a
    third of GPT-2's at batch 1, whose logits take hundreds of MB.
    """
    call_glibc("mallopt", M_MMAP_MAX, 0)
    call_glibc("mallopt", M_TRIM_THRESHOLD, -1)  # never


def release_freed_memory():
    """Give back to the system what the allocator keeps: compilers and measurements free much before the first step."""
    gc.collect()
    call_glibc("malloc_trim", 0)


def call_glibc(function, *arguments):
    """Call a function of glibc; do nothing on a system with another C library."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL("libc.so.6"), function)(*arguments)


def process_memory(device: torch.device) -> int:
    """Return what the run occupies now: allocated bytes on CUDA, else the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return highest_resident()


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far: allocated ones on CUDA, else resident ones of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # unlike resource's figure, this one can be reset
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) * 1024
    except (OSError, TypeError):
        return highest_resident()


def highest_resident() -> int:
    """Return the most bytes this process ever had in memory, as the operating system counts them."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def idle_memory(device: torch.device) -> int:
    """Return the bytes resident before a model is built, and forget an earlier peak; 0 on CUDA, where none are."""
    if device.type == "cuda":
        return 0
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the imports' own peak counts, a low one
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return process_memory(device)
