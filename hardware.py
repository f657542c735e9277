"""What a device can do: memory, matmul dtypes, dense peaks, bandwidth; and which dtype each operation takes on it.

Nothing is guessed: a figure that no vendor publishes and nobody measured is None, and so is an unknown device.
"""

import dataclasses
import difflib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from config import ConfigError

LOCAL_FILE = Path(__file__).resolve().parent / "hardware.local.json"  # measured ceilings of this machine


@dataclass(frozen=True)
class Device:
    name: str
    kind: str  # cpu | cuda (AMD too, as in torch) | mps | tpu
    memory_bytes: int | None = None  # what may be used
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # matmul dtype -> dense FLOP/s
    bandwidth: float | None = None  # of its memory, bytes/s
    source: str = "unknown"  # of the peaks
    dtypes: tuple[str, ...] = ("float32",)  # matmuls it has in hardware, whether or not their peak is known
    link: float | None = None  # from the host's memory to its own, bytes/s
    crossing: float = 0.0  # what one core takes longer to read what another one wrote, s/byte
    # operations timed on it: what -> shapes -> (FLOPs, bytes, seconds), by the key of schedule.py's operations
    op_times: Mapping[str, Mapping[str, list]] = field(default_factory=dict, hash=False, repr=False)

    def has_matmul(self, dtype):
        """Return whether the hardware multiplies matrices of this dtype; a measured peak alone does not say so."""
        return dtype == "float32" or dtype in self.dtypes

    def peak(self, dtype):
        """Return the dense peak of matmuls in dtype, FLOP/s; None where it is unknown."""
        return self.peak_flops.get(dtype)


# --- which dtype each kind of operation takes, under autocast to the dtype of matmuls


# Autocast's own lists differ between CPU and CUDA, so model.py fixes each operation's dtype from this table, and
# accounting.py reads the same one. A key (device kind, operation) overrides the operation's entry on that kind.
OP_DTYPES = {
    "matmul": "autocast",
    "row product": "autocast",  # of one row, in generation
    "attention": "autocast",
    "tiled attention": "autocast",  # attention.py's, whose matmuls are twice as fast in bfloat16 as in float32
    "norm": "float32",
    "rope": "float32",
    "softmax": "float32",
    "loss": "float32",
    "residual": "float32",
    "embedding": "float32",
    # measured on two cores with bfloat16 matmuls: in bfloat16 torch's fused kernel takes four times as long at T = 64,
    # as long at T = 256, four fifths at T = 1,024; and 2.5 times as long for one query and 900 keys
    ("cpu", "attention"): "float32",
    # measured there: 11 G weights/s in float32, as fast as memory is read, and 7.5 in bfloat16
    ("cpu", "row product"): "float32",
}


def operation_dtype(kind, dtype, device_kind):
    """Return the dtype that an operation of this kind computes in, where matmuls compute in dtype."""
    found = OP_DTYPES.get((device_kind, kind), OP_DTYPES.get(kind))
    assert found, f"operation {kind!r} is none of {[key for key in OP_DTYPES if isinstance(key, str)]}"
    return dtype if found == "autocast" else found


def attention_kind(dtype, device_kind, cached, dropout):
    """Return which attention computes, for matmuls in dtype: attention.py's on a CPU, where it pays, else torch's."""
    tiled = device_kind == "cpu" and dtype == "bfloat16" and not cached and not dropout
    return "tiled attention" if tiled else "attention"


# How much loss.py and attention.py do at a time, for them and the schedule alike.
CACHED_NUMBERS = 2**20  # float32 numbers that stay in a CPU's cache from one operation to the next
HEAD_COLUMNS = 2**13  # rows of the head's gradient, which is added up in float32, that are in the matmuls' dtype
SCORES = 2**22  # scores of attention's queries and keys that exist at once
LEAST_QUERIES = 128  # of a tile: matmuls of fewer rows are slower


def tile_size(g, length):
    """Return how many queries, and of how many key-value heads, make a full tile.

    A quarter of a sequence leaves out three eighths of its scores; more parts would add up more often in 16 bits. So a
    long sequence has more than SCORES in the tile of one head.
    """
    t = max(LEAST_QUERIES, -(-length // 4))
    return t, max(1, SCORES // (g * t * length))


def score_tiles(n, g, length):
    """Yield (heads, queries): slices of n key-value heads, with g query heads each, and of a sequence, whose scores are
    made at once.
    """
    t, at_once = tile_size(g, length)
    for head in range(0, n, at_once):
        for start in range(0, length, t):
            yield slice(head, min(head + at_once, n)), slice(start, min(start + t, length))


# --- accelerators that a table knows


VOLTA = ("float32", "float16")  # and Turing
AMPERE = ("float32", "tf32", "bfloat16", "float16")
HOPPER = (*AMPERE, "fp8")  # and Ada, Blackwell, CDNA 3
CDNA2 = ("float32", "bfloat16", "float16")
CDNA4 = (*CDNA2, "fp8")  # without TF32
TPU = ("float32", "bfloat16")
SHEET, HALVED = "the vendor's datasheet", "the vendor's datasheet, its sparse figures halved"
PAPER, DOCS = "the vendor's architecture whitepaper", "the vendor's documentation"
_ = None  # not published, or sources disagree

# Peaks are dense (many datasheets print those with 2:4 sparsity, twice as high), at boost clock, with float32
# accumulation (GeForce cards are twice as fast with float16 accumulation, which is not what training uses).
# A vendor's GB is 1e9 bytes. The last column is the name the driver reports: its words in lower case, less the brands.
# fmt: off
TABLE = {
    # name, matmul dtypes, GB, GB/s, TFLOP/s of: float32, tf32, bfloat16 and float16, fp8; source, driver's name
    ("NVIDIA", "cuda"): {
        "v100-sxm-16gb": ("V100 SXM2 16 GB", VOLTA, 16, 900, 15.7, _, 125, _, SHEET, "v100 sxm2 16gb"),
        "v100-sxm-32gb": ("V100 SXM2 32 GB", VOLTA, 32, 900, 15.7, _, 125, _, SHEET, "v100 sxm2 32gb"),
        "v100-pcie-16gb": ("V100 PCIe 16 GB", VOLTA, 16, 900, 14, _, 112, _, SHEET, "v100 pcie 16gb"),
        "v100-pcie-32gb": ("V100 PCIe 32 GB", VOLTA, 32, 900, 14, _, 112, _, SHEET, "v100 pcie 32gb"),
        "t4": ("T4", VOLTA, 16, 320, 8.1, _, 65, _, SHEET, "t4"),
        "a10": ("A10", AMPERE, 24, 600, 31.2, 62.5, 125, _, SHEET, "a10"),
        "a10g": ("A10G", AMPERE, 24, 600, _, _, _, _, _, "a10g"),
        "a40": ("A40", AMPERE, 48, 696, 37.4, 74.8, 149.7, _, SHEET, "a40"),
        "a6000": ("RTX A6000", AMPERE, 48, 768, 38.7, 77.4, 154.85, _, HALVED, "rtx a6000"),
        "a100-40gb": ("A100 SXM4 40 GB", AMPERE, 40, 1555, 19.5, 156, 312, _, SHEET, "a100 sxm4 40gb"),
        "a100-80gb": ("A100 SXM4 80 GB", AMPERE, 80, 2039, 19.5, 156, 312, _, SHEET, "a100 sxm4 80gb"),
        "a100-pcie-40gb": ("A100 PCIe 40 GB", AMPERE, 40, 1555, 19.5, 156, 312, _, SHEET, "a100 pcie 40gb"),
        "a100-pcie-80gb": ("A100 PCIe 80 GB", AMPERE, 80, 1935, 19.5, 156, 312, _, SHEET, "a100 80gb pcie"),
        "rtx3090": ("RTX 3090", AMPERE, 24, 936, 35.6, 35.6, 71, _, PAPER, "rtx 3090"),
        "rtx4090": ("RTX 4090", HOPPER, 24, 1008, 82.6, 82.6, 165.2, 330.3, PAPER, "rtx 4090"),
        "rtx5090": ("RTX 5090", HOPPER, 32, 1792, 104.8, _, 209.5, _, PAPER, "rtx 5090"),
        "rtx6000-ada": ("RTX 6000 Ada", HOPPER, 48, 960, 91.1, _, 364.25, _, HALVED, "rtx 6000 ada generation"),
        "l4": ("L4", HOPPER, 24, 300, 30.3, 60, 121, 242.5, HALVED, "l4"),
        "l40": ("L40", HOPPER, 48, 864, _, 90.5, 181.05, 362, SHEET, "l40"),
        "l40s": ("L40S", HOPPER, 48, 864, 91.6, 183, 362.05, 733, SHEET, "l40s"),
        "h20": ("H20", HOPPER, 96, 4000, 44, 74, 148, _, "the trade press", "h20"),
        "h100-sxm": ("H100 SXM5 80 GB", HOPPER, 80, 3350, 66.9, 494.7, 989.4, 1978.9, PAPER, "h100 80gb hbm3"),
        "h100-pcie": ("H100 PCIe 80 GB", HOPPER, 80, 2000, 51.2, 378, 756, 1513, PAPER, "h100 pcie"),
        "h100-nvl": ("H100 NVL 94 GB", HOPPER, 94, 3900, 60, 417.5, 835.5, 1670.5, HALVED, "h100 nvl"),
        "h200": ("H200 SXM 141 GB", HOPPER, 141, 4800, 66.9, 494.7, 989.4, 1978.9, HALVED, "h200"),
        "h200-nvl": ("H200 NVL 141 GB", HOPPER, 141, 4800, _, _, 835.5, _, HALVED, "h200 nvl"),
        "gh200": ("GH200 96 GB", HOPPER, 96, 4000, 66.9, 494.7, 989.4, 1978.9, HALVED, "gh200 480gb"),
        "b200": ("B200", HOPPER, 180, 8000, 80, 1125, 2250, 4500, HALVED, "b200"),
        "gb200": ("GB200, one GPU", HOPPER, 186, 8000, _, 1250, 2500, 5000, HALVED, "gb200"),
        "b300": ("B300", HOPPER, _, 8000, _, _, 2250, _, HALVED, "b300 sxm6 ac"),
        "gb300": ("GB300, one GPU", HOPPER, _, 8000, _, _, 2500, _, HALVED, "gb300"),
    },
    ("AMD", "cuda"): {  # torch's ROCm builds say "cuda"
        # a card is two dies (GCDs), each a device to torch: half of the card's 383 TFLOP/s, 128 GB and 3277 GB/s
        "mi250x": ("MI250X, one GCD", CDNA2, 64, 1638.4, _, _, 191.5, _, SHEET, "mi250x"),
        "mi300x": ("MI300X", HOPPER, 192, 5300, 163.4, 653.7, 1307.4, 2614.9, SHEET, "mi300x"),
        "mi325x": ("MI325X", HOPPER, 256, 6000, 163.4, 653.7, 1307.4, 2614.9, SHEET, "mi325x"),
        "mi355x": ("MI355X", CDNA4, 288, 8000, _, _, 2516.6, 5033.2, SHEET, "mi355x"),
    },
    ("Google", "tpu"): {
        "tpu-v4": ("TPU v4, one chip", TPU, 32, 1200, _, _, 275, _, DOCS, _),
        "tpu-v5e": ("TPU v5e, one chip", TPU, 16, 819, _, _, 197, _, DOCS, _),
        "tpu-v5p": ("TPU v5p, one chip", TPU, 95, 2765, _, _, 459, _, DOCS, _),
        "tpu-v6e": ("TPU v6e, one chip", TPU, 32, 1638, _, _, 918, _, DOCS, _),
    },
}
ALIASES = {
    "v100": "v100-sxm-16gb", "v100-sxm": "v100-sxm-16gb", "v100-pcie": "v100-pcie-16gb", "a100": "a100-80gb",
    "a100-sxm": "a100-80gb", "a100-pcie": "a100-pcie-80gb", "h100": "h100-sxm", "h200-sxm": "h200",
    "rtx-a6000": "a6000",
}  # which variant a short name is taken for: the Device's name says it
# fmt: on
LINKS = {  # GB/s in one direction: 16 lanes of PCI Express 3, 4 and 5 (128 of 130 bits are data), NVLink-C2C
    15.75: "v100-sxm-16gb v100-sxm-32gb v100-pcie-16gb v100-pcie-32gb t4",
    31.5: "a10 a10g a40 a6000 a100-40gb a100-80gb a100-pcie-40gb a100-pcie-80gb rtx3090 rtx4090 rtx6000-ada l4 l40 "
    "l40s mi250x",
    63: "rtx5090 h20 h100-sxm h100-pcie h100-nvl h200 h200-nvl b200 mi300x mi325x mi355x",
    450: "gh200 gb200",
}
BRANDS = {"nvidia", "tesla", "geforce", "amd", "instinct"}


def device_of_row(vendor, kind, row, link_gb_per_s):
    """Return the Device of a row of the table, in bytes, bytes/s and FLOP/s."""
    name, dtypes, gb, gb_per_s, float32, tf32, half, fp8, source, _ = row
    tflops = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half, "fp8": fp8}
    peaks = {dtype: round(tflops[dtype] * 1e12) for dtype in dtypes if tflops[dtype]}
    memory, bandwidth, link = (x and round(x * 1e9) for x in (gb, gb_per_s, link_gb_per_s))
    return Device(f"{vendor} {name}", kind, memory, peaks, bandwidth, source or "unknown", dtypes, link)


ACCELERATORS = {
    key: device_of_row(*maker, row, next((gb for gb, keys in LINKS.items() if key in keys.split()), None))
    for maker, rows in TABLE.items()
    for key, row in rows.items()
}
DRIVER_NAMES = {row[-1]: key for rows in TABLE.values() for key, row in rows.items() if row[-1]}


def accelerator(name):
    """Return the Device that a user calls `name`: a key of the table, a short name, or what the driver says."""
    key = name.strip().lower()
    device = ACCELERATORS.get(ALIASES.get(key, key)) or match(name)
    if device is None:
        close = difflib.get_close_matches(key, [*ACCELERATORS, *ALIASES], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(
            f"--gpu={name}: not in the table; {hint}--gpu takes one of {', '.join(ACCELERATORS)}; any other card goes "
            "by --peak_flops, --bandwidth and --memory"
        )
    return device


def match(device_name):
    """Return the Device of the name a driver reports; None unless the table has exactly these words.

    A further word is another device: a laptop's chip, a slice (MIG), a cut-down or differently clocked variant.
    """
    words = re.findall(r"[\w.]+", device_name.lower())
    while words and words[0] in BRANDS:
        words.pop(0)
    key = DRIVER_NAMES.get(" ".join(words))
    return ACCELERATORS[key] if key else None


# --- this machine's CPU


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
    return Device(f"{name}, {usable_cores()} threads", "cpu", available_memory(root), dtypes=dtypes)


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


# --- measured ceilings


def read_local(path=LOCAL_FILE):
    """Return the measured devices of a file by name; none where it is absent or damaged."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        devices = {name: Device(**entry | {"dtypes": tuple(entry["dtypes"])}) for name, entry in entries.items()}
        for d in devices.values():
            times = [seconds for known in d.op_times.values() for _, _, seconds in known.values()]
            figures = [*d.peak_flops.values(), *times, d.bandwidth or 1, d.link or 1]
            if not (all(0 < x < math.inf for x in figures) and 0 <= d.crossing < math.inf):
                return {}
        return devices
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def write_local(device, path=LOCAL_FILE):
    """Add a device's measured figures to the file, beside other devices and over its own earlier figures."""
    devices = read_local(path)
    if earlier := devices.get(device.name):
        peaks, bandwidth = {**earlier.peak_flops, **device.peak_flops}, device.bandwidth or earlier.bandwidth
        times = {w: {**earlier.op_times.get(w, {}), **device.op_times.get(w, {})}
                 for w in (*earlier.op_times, *device.op_times)}  # fmt: skip
        device = dataclasses.replace(
            device, peak_flops=peaks, bandwidth=bandwidth, link=device.link or earlier.link, op_times=times
        )
    entries = {name: dataclasses.asdict(entry) for name, entry in {**devices, device.name: device}.items()}
    unfinished = Path(f"{path}.{os.getpid()}")  # renamed when complete, so that no reader sees half a file
    unfinished.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def with_measured(device, path=LOCAL_FILE):
    """Return the device with the figures it lacks filled in from the file, and their source named."""
    measured = read_local(path).get(device.name)
    if not measured or measured.kind != device.kind:
        return device
    peaks = {**measured.peak_flops, **device.peak_flops}
    bandwidth = device.bandwidth or measured.bandwidth
    device = dataclasses.replace(
        device, link=device.link or measured.link, crossing=measured.crossing, op_times=measured.op_times
    )
    if peaks == device.peak_flops and bandwidth == device.bandwidth:
        return device
    source = measured.source if device.source == "unknown" else f"{device.source}; {measured.source}"
    return dataclasses.replace(device, peak_flops=peaks, bandwidth=bandwidth, source=source)


def local_device(setting, path=LOCAL_FILE):
    """Return the device that a run here would use, as far as that is known without asking it: without torch.

    Of GPUs this knows those that train.py has met on this machine; "auto" takes such a one before the CPU.
    """
    met = [device for device in read_local(path).values() if device.kind == setting.split(":")[0]]
    if setting == "auto":
        met = [device for device in read_local(path).values() if device.kind != "cpu"]
    if met and setting != "cpu":
        return met[-1]
    if setting not in ("auto", "cpu"):
        raise ConfigError(f"device={setting!r}: no such device was met on this machine yet; name a card with --gpu")
    return with_measured(local_cpu(), path)
