"""The table against clock x units x rate, names against what drivers report, memory against fake /proc and /sys."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hardware
import measure
from config import Config, ConfigError, resolve
from hardware import ACCELERATORS, ALIASES, DRIVER_NAMES, OP_DTYPES, Device, accelerator, match, operation_dtype

GIB = 2**30

# --- the table


@pytest.mark.parametrize(
    "key, mhz, flops_per_clock, units, share",
    [  # boost clock, dense bfloat16 or float16 FLOPs per clock and unit, tensor cores or compute units; share of a card
        ("v100-sxm-16gb", 1530, 64 * 2, 640, 1),
        ("t4", 1590, 64 * 2, 320, 1),
        ("a10", 1695, 128 * 2, 288, 1),
        ("a40", 1740, 128 * 2, 336, 1),
        ("a6000", 1800, 128 * 2, 336, 1),
        ("a100-40gb", 1410, 256 * 2, 432, 1),
        ("a100-pcie-80gb", 1410, 256 * 2, 432, 1),
        ("rtx3090", 1695, 64 * 2, 328, 1),
        ("rtx4090", 2520, 64 * 2, 512, 1),
        ("rtx6000-ada", 2505, 128 * 2, 568, 1),
        ("l4", 2040, 128 * 2, 232, 1),
        ("h100-sxm", 1830, 512 * 2, 528, 1),
        ("h100-pcie", 1620, 512 * 2, 456, 1),
        ("h200", 1830, 512 * 2, 528, 1),
        ("mi250x", 1700, 128 * 8, 220, 1 / 2),
        ("mi300x", 2100, 256 * 8, 304, 1),
        ("mi355x", 2400, 4096, 256, 1),
    ],
)
def test_peak_is_clock_times_units_times_rate(key, mhz, flops_per_clock, units, share):
    assert ACCELERATORS[key].peak("float16") == pytest.approx(mhz * 1e6 * flops_per_clock * units * share, rel=0.005)


@pytest.mark.parametrize(
    "key, sparse",
    [
        ("a10", 250), ("a40", 299.4), ("a6000", 309.7), ("a100-40gb", 624), ("a100-80gb", 624),
        ("a100-pcie-40gb", 624), ("a100-pcie-80gb", 624), ("rtx3090", 142), ("rtx4090", 330.4), ("rtx5090", 419),
        ("rtx6000-ada", 728.5), ("l4", 242), ("l40", 362), ("l40s", 733), ("h20", 296), ("h100-sxm", 1979),
        ("h100-pcie", 1513), ("h100-nvl", 1671), ("h200", 1979), ("h200-nvl", 1671), ("gh200", 1979),
        ("b200", 4500), ("gb200", 5000), ("mi300x", 2614.9), ("mi325x", 2614.9),
    ],
)  # fmt: skip
def test_peak_is_half_of_the_sparse_figure(key, sparse):
    assert ACCELERATORS[key].peak("bfloat16") == pytest.approx(sparse * 1e12 / 2, rel=0.015)


@pytest.mark.parametrize("key", ACCELERATORS)
def test_rows_are_consistent(key):
    device = ACCELERATORS[key]
    assert set(device.peak_flops) <= set(device.dtypes)
    assert device.peak("bfloat16") in (device.peak("float16"), None) or device.kind == "tpu"
    assert device.source == "unknown" if not device.peak_flops else device.source
    assert device.memory_bytes is None or 16e9 <= device.memory_bytes <= 288e9
    assert device.bandwidth is None or 300e9 <= device.bandwidth <= 8000e9
    for slow, fast in [("float32", "tf32"), ("tf32", "bfloat16"), ("bfloat16", "fp8")]:
        if device.peak(slow) and device.peak(fast):
            assert 1 <= device.peak(fast) / device.peak(slow) < 15
    if device.peak("tf32"):
        assert device.peak("bfloat16") / device.peak("tf32") == pytest.approx(2, rel=0.02)
    if device.peak("fp8"):
        assert device.peak("fp8") / device.peak("bfloat16") == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("key", [key for key in ACCELERATORS if key.startswith(("v100", "t4"))])
def test_volta_and_turing_have_no_bfloat16(key):
    device = ACCELERATORS[key]
    assert device.has_matmul("float16") and device.has_matmul("float32") and not device.has_matmul("bfloat16")
    assert device.peak("bfloat16") is None
    assert resolve(Config(vocab_size=256), device).dtype == "float16"


def test_peak_follows_the_dtype_in_use():
    a100 = accelerator("a100-40gb")
    assert [a100.peak(dtype) for dtype in ("float32", "tf32", "bfloat16", "float16", "fp8")] == [
        19.5e12, 156e12, 312e12, 312e12, None
    ]  # fmt: skip
    assert a100.memory_bytes == 40e9 and a100.bandwidth == 1555e9


def test_a_matmul_may_be_native_while_its_peak_is_unknown():
    device = accelerator("a10g")
    assert device.has_matmul("bfloat16") and device.peak("bfloat16") is None


def test_a_device_can_be_a_cache_key():
    assert hash(accelerator("h100")) == hash(accelerator("h100-sxm"))


# --- names

REAL_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-sxm-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm-32gb",
    "Tesla V100-PCIE-16GB": "v100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize("name", REAL_NAMES)
def test_real_names_find_their_row(name):
    assert match(name) is ACCELERATORS[REAL_NAMES[name]]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA A1000",
        "NVIDIA RTX A1000",
        "NVIDIA XA100",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A40-48Q",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA H800",
        "NVIDIA L400",
        "Tesla T40 24GB",
        "Tesla V100-SXM2-16GB-N",
        "Quadro RTX 6000",
        "AMD Instinct MI300A",
        "AMD Instinct MI250X/MI250",
        "AMD Radeon Graphics",
        "Apple M3 Max",
        "cpu",
        "NVIDIA",
        "",
    ],
)
def test_near_misses_are_unknown(name):
    assert match(name) is None


def test_driver_names_are_unique():
    assert len(DRIVER_NAMES) == sum(device.kind == "cuda" for device in ACCELERATORS.values())


def test_short_names_say_which_variant_they_mean():
    assert set(ALIASES.values()) <= set(ACCELERATORS) and not set(ALIASES) & set(ACCELERATORS)
    assert accelerator("h100").name == "NVIDIA H100 SXM5 80 GB"
    assert accelerator("A100").name == "NVIDIA A100 SXM4 80 GB"
    assert accelerator("NVIDIA H100 PCIe") is accelerator("h100-pcie")


@pytest.mark.parametrize("name, near", [("h10", "h100"), ("a100-sxm-90gb", "a100-sxm"), ("rtx-4090x", "rtx4090")])
def test_unknown_gpu_names_the_nearest_and_the_way_out(name, near):
    with pytest.raises(ConfigError, match=f"--gpu={name}: not in the table; did you mean .*{near}.*--gpu takes one of"):
        accelerator(name)


def test_unknown_gpu_without_a_neighbour_lists_the_table():
    with pytest.raises(ConfigError, match=r"not in the table; --gpu takes one of v100-sxm-16gb, .*mi300x"):
        accelerator("???")


# --- dtypes of operations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device_kind", ["cpu", "cuda", "mps"])
def test_operation_dtypes(dtype, device_kind):
    assert operation_dtype("matmul", dtype, device_kind) == dtype
    assert operation_dtype("attention", dtype, device_kind) == OP_DTYPES.get((device_kind, "attention"), dtype)
    for kind in ("norm", "rope", "softmax", "loss", "residual", "embedding"):
        assert operation_dtype(kind, dtype, device_kind) == "float32"


def test_operation_dtype_can_differ_on_one_kind_of_device(monkeypatch):
    monkeypatch.setitem(OP_DTYPES, ("mps", "attention"), "float32")
    assert operation_dtype("attention", "bfloat16", "mps") == "float32"
    assert operation_dtype("attention", "bfloat16", "cuda") == "bfloat16"


def test_unknown_operation_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="'convolution' is none of"):
        operation_dtype("convolution", "bfloat16", "cuda")


# --- this machine's CPU


def machine(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return hardware.local_cpu(root)


MEMINFO = {"proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1024 kB\nMemAvailable:   16777216 kB\n"}  # 16 GiB available


@pytest.mark.parametrize(
    "cpuinfo, model, native",
    [
        ("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: fpu avx512f avx512_bf16\n", "A CPU @ 2 GHz", True),
        ("model name\t: B\nflags\t\t: fpu amx_bf16 amx_tile\n", "B", True),
        ("model name\t: C\nflags\t\t: fpu avx2 avx512f\n", "C", False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", "", True),
        ("processor\t: 0\nFeatures\t: fp asimd svebf16\n", "", False),
        ("", "", False),
    ],
)
def test_cpu_name_and_dtypes(tmp_path, cpuinfo, model, native):
    cpu = machine(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu.name.startswith(model) and cpu.name.endswith(" threads")
    assert cpu.has_matmul("bfloat16") == native and cpu.has_matmul("float32")
    assert cpu.peak_flops == {} and cpu.peak("float32") is None and cpu.source == "unknown" and cpu.kind == "cpu"


def test_memory_without_a_limit_is_what_the_system_has_available(tmp_path):
    assert machine(tmp_path, MEMINFO).memory_bytes == 16 * GIB


def v2(folder, limit, usage, inactive_file=0):
    base = f"sys/fs/cgroup{folder}"
    stat = f"anon 5\nfile 7\ninactive_file {inactive_file}\nactive_file 3\n"
    return {f"{base}/memory.max": f"{limit}\n", f"{base}/memory.current": f"{usage}\n", f"{base}/memory.stat": stat}


def v1(folder, limit, usage, inactive_file=0):
    base = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 1\ntotal_inactive_file {inactive_file}\n"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": stat,
    }


NO_LIMIT_V1 = 9223372036854771712
V2_PATH = {"proc/self/cgroup": "0::/user.slice/job:7.scope\n"}
V1_PATH = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n1:cpuset:/\n0::/\n"}


@pytest.mark.parametrize(
    "files, expected",
    [
        (V2_PATH | v2("/user.slice/job:7.scope", 8 * GIB, 3 * GIB), 5 * GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", 8 * GIB, 3 * GIB, inactive_file=GIB), 6 * GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", "max", 3 * GIB), 16 * GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", "max", GIB) | v2("/user.slice", 4 * GIB, GIB), 3 * GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", 2 * GIB, GIB) | v2("/user.slice", 4 * GIB, 2 * GIB), GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", 64 * GIB, GIB), 16 * GIB),
        (V2_PATH | v2("/user.slice/job:7.scope", GIB, 2 * GIB), 0),
        (V2_PATH | v2("/user.slice/another.scope", GIB, 0), 16 * GIB),
        ({"proc/self/cgroup": "0::/\n"} | v2("", 2 * GIB, GIB), GIB),
        ({"proc/self/cgroup": "0::/../outside\n"} | v2("", 2 * GIB, GIB), GIB),
        (V1_PATH | v1("/docker/abc", 4 * GIB, 2 * GIB), 2 * GIB),
        (V1_PATH | v1("/docker/abc", 4 * GIB, 2 * GIB, inactive_file=GIB), 3 * GIB),
        (V1_PATH | v1("/docker/abc", NO_LIMIT_V1, 2 * GIB) | v1("", NO_LIMIT_V1, GIB), 16 * GIB),
        (V1_PATH | v1("/docker/abc", NO_LIMIT_V1, 2 * GIB) | v1("/docker", 3 * GIB, GIB), 2 * GIB),
        (V1_PATH | v1("", 3 * GIB, GIB), 2 * GIB),  # a container that sees only its own group, as the root
    ],
)
def test_memory_is_the_least_that_system_and_control_groups_leave(tmp_path, files, expected):
    assert machine(tmp_path, MEMINFO | files).memory_bytes == expected


def test_memory_by_a_control_group_alone(tmp_path):
    assert machine(tmp_path, V2_PATH | v2("/user.slice/job:7.scope", 2 * GIB, GIB)).memory_bytes == GIB


def test_memory_without_proc_is_the_total_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.os, "sysconf_names", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2}, raising=False)
    monkeypatch.setattr(hardware.os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1000}.get, raising=False)
    assert hardware.local_cpu(tmp_path).memory_bytes == 16384 * 1000
    monkeypatch.delattr(hardware.os, "sysconf_names")
    assert hardware.local_cpu(tmp_path).memory_bytes is None


def test_this_machine_is_described():
    cpu = hardware.local_cpu()
    assert cpu.kind == "cpu" and cpu.name and (cpu.memory_bytes is None or cpu.memory_bytes > 0)


# --- measured ceilings

CPU = Device("A CPU, 2 threads", "cpu", 8 * GIB)
MEASURED = dataclasses.replace(CPU, peak_flops={"float32": 1e11, "bfloat16": 2e11}, source="measured: matmul of 2048")


def test_measured_peaks_survive(tmp_path):
    path = tmp_path / "hardware.local.json"
    hardware.write_local(MEASURED, path)
    assert hardware.read_local(path) == {MEASURED.name: MEASURED}
    found = hardware.with_measured(CPU, path)
    assert found.peak("float32") == 1e11 and found.source == "measured: matmul of 2048"
    assert [entry.name for entry in tmp_path.iterdir()] == ["hardware.local.json"]


def test_a_measured_peak_does_not_make_a_dtype_native(tmp_path):
    path = tmp_path / "hardware.local.json"
    hardware.write_local(dataclasses.replace(MEASURED, dtypes=("float32", "bfloat16")), path)
    found = hardware.with_measured(CPU, path)
    assert found.peak("bfloat16") == 2e11 and not found.has_matmul("bfloat16")


def test_writing_keeps_other_devices_and_other_figures(tmp_path):
    path = tmp_path / "hardware.local.json"
    other = Device("Other", "cuda", None, {"float32": 1e13}, 1e12, "measured")
    hardware.write_local(other, path)
    hardware.write_local(MEASURED, path)
    hardware.write_local(dataclasses.replace(CPU, peak_flops={"float32": 3e11}, bandwidth=2e10, source="again"), path)
    found = hardware.read_local(path)
    assert found["Other"] == other
    assert found[CPU.name].peak_flops == {"float32": 3e11, "bfloat16": 2e11}
    assert found[CPU.name].bandwidth == 2e10 and found[CPU.name].source == "again"


def test_times_of_operations_are_kept_beside_earlier_ones(tmp_path):
    path = tmp_path / "hardware.local.json"
    first = {"linear": {"2x3": [1, 2, 0.5], "4x5": [3, 4, 0.25]}}
    hardware.write_local(dataclasses.replace(MEASURED, op_times=first, crossing=1e-11), path)
    second = {"linear": {"4x5": [3, 4, 0.75]}, "gelu": {"6": [0, 8, 1e-6]}}
    hardware.write_local(dataclasses.replace(CPU, op_times=second, crossing=2e-11), path)
    found = hardware.with_measured(CPU, path)
    merged = {"linear": {"2x3": [1, 2, 0.5], "4x5": [3, 4, 0.75]}, "gelu": {"6": [0, 8, 1e-6]}}
    assert found.op_times == merged and found.crossing == 2e-11 and found.peak("float32") == 1e11


def test_the_table_wins_over_the_file(tmp_path):
    path = tmp_path / "hardware.local.json"
    a100, h200_nvl = accelerator("a100"), accelerator("h200-nvl")
    for device in (a100, h200_nvl):
        peaks = {"float32": 1e12, "tf32": 2e12, "bfloat16": 3e12, "float16": 4e12}
        hardware.write_local(dataclasses.replace(device, peak_flops=peaks, bandwidth=1e9, source="measured"), path)
    assert hardware.with_measured(a100, path) == a100
    filled = hardware.with_measured(h200_nvl, path)
    assert filled.peak("bfloat16") == 835.5e12 and filled.peak("tf32") == 2e12 and filled.bandwidth == 4800e9
    assert filled.source == f"{h200_nvl.source}; measured"


def test_a_device_of_the_same_name_but_another_kind_is_another_device(tmp_path):
    path = tmp_path / "hardware.local.json"
    hardware.write_local(dataclasses.replace(MEASURED, kind="mps"), path)
    assert hardware.with_measured(CPU, path) == CPU


ENTRY = dataclasses.asdict(MEASURED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"A CPU, 2 threads": 3}',
        '{"A CPU, 2 threads": {}}',
        json.dumps({CPU.name: ENTRY})[:-20],
        json.dumps({CPU.name: ENTRY | {"peak_flops": [1]}}),
        json.dumps({CPU.name: ENTRY | {"peak_flops": {"float32": "fast"}}}),
        json.dumps({CPU.name: ENTRY | {"peak_flops": {"float32": float("nan")}}}),
        json.dumps({CPU.name: ENTRY | {"peak_flops": {"float32": -1}}}),
        json.dumps({CPU.name: ENTRY | {"bandwidth": "fast"}}),
        json.dumps({CPU.name: ENTRY | {"surplus": 1}}),
        json.dumps({CPU.name: ENTRY | {"op_times": {"linear": {"2x3": [1, 2]}}}}),
        json.dumps({CPU.name: ENTRY | {"op_times": {"linear": {"2x3": [1, 2, 0]}}}}),
        json.dumps({CPU.name: ENTRY | {"op_times": [1]}}),
        json.dumps({CPU.name: ENTRY | {"crossing": -1}}),
        json.dumps({CPU.name: ENTRY | {"link": "fast"}}),
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    path = tmp_path / "hardware.local.json"
    path.write_text(text)
    assert hardware.read_local(path) == {} and hardware.with_measured(CPU, path) == CPU
    hardware.write_local(MEASURED, path)
    assert hardware.read_local(path) == {MEASURED.name: MEASURED}


def test_no_file_is_no_measurement(tmp_path):
    assert hardware.read_local(tmp_path / "none.json") == {}
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert hardware.read_local(tmp_path / "bytes.json") == {}


# --- what slows a CPU


@pytest.mark.parametrize(
    "threads, omp, load, nodes, words",
    [
        (2, False, 2.4, 1, []),
        (4, False, 0.0, 1, ["4 threads on 2 cores; OMP_NUM_THREADS=2 gives each its own"]),
        (1, True, 0.0, 1, ["1 threads on 2 cores; OMP_NUM_THREADS=2 gives each its own"]),
        (1, False, 0.0, 1, []),  # torch's own choice, where two threads share a core
        (2, False, 2.6, 1, ["2.6 threads wanted 2 cores in the last minute"]),
        (2, False, 0.0, 2, ["memory lies in 2 nodes; numactl --cpunodebind=0 --membind=0"]),
    ],
)
def test_what_slows_a_cpu_is_said_with_the_way_out(monkeypatch, tmp_path, threads, omp, load, nodes, words):
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0), raising=False)
    monkeypatch.setattr(measure, "MEMORY_NODES", tmp_path)
    for i in range(nodes):
        (tmp_path / f"node{i}").mkdir()
    (tmp_path / "possible").touch()
    monkeypatch.setenv("OMP_NUM_THREADS", "1") if omp else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = measure.what_slows_cpus()
    assert len(found) == len(words) and all(text.startswith(word) for text, word in zip(found, words, strict=True))


# --- imports


def test_importing_hardware_imports_neither_torch_nor_numpy():
    code = "import sys, hardware; print({'torch', 'numpy'} & set(sys.modules))"
    root = Path(hardware.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
