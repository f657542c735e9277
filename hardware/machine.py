"""This machine: its CPU, the memory that is free, and the figures measured here, kept in hardware.local.json."""

import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
from pathlib import Path

from cli.errors import ConfigError
from cli.files import replace_text
from hardware.spec import DeviceSpec

LOCAL_FILE = Path(__file__).resolve().parents[1] / "hardware.local.json"  # measured ceilings of this machine


def usable_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def local_cpu(root="/"):
    """Return this machine's CPU, without peaks: what it attains is measured, not looked up."""
    root = Path(root)
    cpuinfo = read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", cpuinfo, re.M)
    native = flags and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags[1].split())  # two of x86, one of Arm
    dtypes = ("float32", "bfloat16") if native else ("float32",)
    return DeviceSpec(f"{name}, {usable_cores()} threads", "cpu", available_memory(root), dtypes=dtypes)


def available_memory(root):
    """Return the bytes a process may still take: the least that the system and its control groups leave it."""
    system = re.search(r"^MemAvailable:\s*(\d+) kB", read(root / "proc/meminfo"), re.M)
    left = [int(system[1]) * 1024] if system else []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):  # version 1
            base, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base.joinpath(*filter(None, path.split("/")))
        for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(base))]:
            limit, usage = (read(folder / file).strip() for file in files)
            if limit.isdigit() and usage.isdigit() and int(limit) < 2**60:  # version 1 writes "none" as about 2**63
                stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
                cache = stat.get("total_inactive_file") or stat.get("inactive_file") or 0  # given back under pressure
                left.append(max(0, int(limit) - int(usage) + int(cache)))
    if not left and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all of it: macOS has no /proc
    return min(left, default=None)


def read(path):
    """Return a file's text; nothing where this system does not have it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def read_local(path=None):
    """Return the measured devices of a file (LOCAL_FILE) by name; none where it is absent or damaged."""
    try:
        entries = json.loads(Path(path or LOCAL_FILE).read_text(encoding="utf-8"))
        specs = {name: DeviceSpec.from_dict(entry) for name, entry in entries.items()}
        for d in specs.values():
            times = [seconds for known in d.op_times.values() for _, _, seconds in known.values()]
            figures = [*d.peak_flops.values(), *times, d.bandwidth or 1, d.link or 1]
            if not (all(0 < x < math.inf for x in figures) and 0 <= d.cross_core_s_per_byte < math.inf):
                return {}
        return specs
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_local(spec, path=None):
    """Add a device's measured figures to the file, over its own earlier figures; other devices stay.

    Earlier figures that were measured under another torch or with another number of threads are dropped.
    """
    path = path or LOCAL_FILE
    specs = read_local(path)
    earlier = specs.get(spec.name)
    if earlier and same_conditions(earlier.measured_with, spec.measured_with):
        times = {w: {**earlier.op_times.get(w, {}), **spec.op_times.get(w, {})}
                 for w in (*earlier.op_times, *spec.op_times)}  # fmt: skip
        spec = dataclasses.replace(
            spec,
            peak_flops={**earlier.peak_flops, **spec.peak_flops},
            bandwidth=spec.bandwidth or earlier.bandwidth,
            link=spec.link or earlier.link,
            op_times=times,
        )
    entries = {name: dataclasses.asdict(entry) for name, entry in {**specs, spec.name: spec}.items()}
    replace_text(Path(path), json.dumps(entries, indent=2) + "\n")


def with_measured(spec, path=None, conditions=""):
    """Return the spec with the figures it lacks filled in from the file, and their source named.

    `conditions` says under which torch and with how many threads the figures are wanted; others are not used.
    """
    measured = read_local(path).get(spec.name)
    if not measured or measured.kind != spec.kind or not same_conditions(measured.measured_with, conditions):
        return dataclasses.replace(spec, measured_with=conditions)
    peaks = {**measured.peak_flops, **spec.peak_flops}
    bandwidth = spec.bandwidth or measured.bandwidth
    spec = dataclasses.replace(
        spec,
        link=spec.link or measured.link,
        cross_core_s_per_byte=measured.cross_core_s_per_byte,
        op_times=measured.op_times,
        measured_with=conditions or measured.measured_with,
    )
    if peaks == spec.peak_flops and bandwidth == spec.bandwidth:
        return spec
    source = measured.source if spec.source == "unknown" else f"{spec.source}; {measured.source}"
    return dataclasses.replace(spec, peak_flops=peaks, bandwidth=bandwidth, source=source)


def same_conditions(a, b):
    """Return whether figures measured under the one may be used under the other; what one of them lacks is ignored."""
    pairs = itertools.zip_longest(a.split(", "), b.split(", "), fillvalue="")
    return all(x == y or not x or not y for x, y in pairs)


def installed_torch():
    """Return the conditions as far as they are known without importing torch: its version, or "" if there is none."""
    try:
        return f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def local_device(setting, path=None):
    """Return the device that a run here would use, as far as that is known without asking it: without torch.

    The GPUs of this machine are known from the runs of train.py on them; "auto" prefers such a GPU to the CPU.
    """
    used = [spec for spec in read_local(path).values() if spec.kind == setting.split(":")[0]]
    if setting == "auto":
        used = [spec for spec in read_local(path).values() if spec.kind != "cpu"]
    if used and setting != "cpu":
        return used[-1]
    if setting not in ("auto", "cpu"):
        raise ConfigError(f"device={setting!r}: no such device has been used here yet; name a card with --gpu")
    return with_measured(local_cpu(), path, installed_torch())
