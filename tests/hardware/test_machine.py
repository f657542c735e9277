"""This machine: its CPU and memory against fake /proc and /sys, and the file that keeps what was measured here."""

import dataclasses
import json
import subprocess
import sys

import pytest

from config import ROOT
from hardware import machine
from hardware.accelerators import accelerator
from hardware.spec import DeviceSpec

GIB = 2**30

# --- this machine's CPU


def described(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return machine.local_cpu(root)


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
    cpu = described(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu.name.startswith(model) and cpu.name.endswith(" threads")
    assert cpu.has_matmul("bfloat16") == native and cpu.has_matmul("float32")
    assert cpu.peak_flops == {} and cpu.peak("float32") is None and cpu.source == "unknown" and cpu.kind == "cpu"


def test_memory_without_a_limit_is_what_the_system_has_available(tmp_path):
    assert described(tmp_path, MEMINFO).memory_bytes == 16 * GIB


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
    assert described(tmp_path, MEMINFO | files).memory_bytes == expected


def test_memory_by_a_control_group_alone(tmp_path):
    assert described(tmp_path, V2_PATH | v2("/user.slice/job:7.scope", 2 * GIB, GIB)).memory_bytes == GIB


def test_memory_without_proc_is_the_total_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "sysconf_names", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 2}, raising=False)
    monkeypatch.setattr(machine.os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 1000}.get, raising=False)
    assert machine.local_cpu(tmp_path).memory_bytes == 16384 * 1000
    monkeypatch.delattr(machine.os, "sysconf_names")
    assert machine.local_cpu(tmp_path).memory_bytes is None


def test_this_machine_is_described():
    cpu = machine.local_cpu()
    assert cpu.kind == "cpu" and cpu.name and (cpu.memory_bytes is None or cpu.memory_bytes > 0)


# --- measured ceilings

CPU = DeviceSpec("A CPU, 2 threads", "cpu", 8 * GIB)
MEASURED = dataclasses.replace(CPU, peak_flops={"float32": 1e11, "bfloat16": 2e11}, source="measured: matmul of 2048")


def test_measured_peaks_survive(tmp_path):
    path = tmp_path / "hardware.local.json"
    machine.write_local(MEASURED, path)
    assert machine.read_local(path) == {MEASURED.name: MEASURED}
    found = machine.with_measured(CPU, path)
    assert found.peak("float32") == 1e11 and found.source == "measured: matmul of 2048"
    assert [entry.name for entry in tmp_path.iterdir()] == ["hardware.local.json"]


def test_a_measured_peak_does_not_make_a_dtype_native(tmp_path):
    path = tmp_path / "hardware.local.json"
    machine.write_local(dataclasses.replace(MEASURED, dtypes=("float32", "bfloat16")), path)
    found = machine.with_measured(CPU, path)
    assert found.peak("bfloat16") == 2e11 and not found.has_matmul("bfloat16")


def test_writing_keeps_other_devices_and_other_figures(tmp_path):
    path = tmp_path / "hardware.local.json"
    other = DeviceSpec("Other", "cuda", None, {"float32": 1e13}, 1e12, "measured")
    machine.write_local(other, path)
    machine.write_local(MEASURED, path)
    machine.write_local(dataclasses.replace(CPU, peak_flops={"float32": 3e11}, bandwidth=2e10, source="again"), path)
    found = machine.read_local(path)
    assert found["Other"] == other
    assert found[CPU.name].peak_flops == {"float32": 3e11, "bfloat16": 2e11}
    assert found[CPU.name].bandwidth == 2e10 and found[CPU.name].source == "again"


def test_times_of_operations_are_kept_beside_earlier_ones(tmp_path):
    path = tmp_path / "hardware.local.json"
    first = {"linear": {"2x3": [1, 2, 0.5], "4x5": [3, 4, 0.25]}}
    machine.write_local(dataclasses.replace(MEASURED, op_times=first, cross_core_s_per_byte=1e-11), path)
    second = {"linear": {"4x5": [3, 4, 0.75]}, "gelu": {"6": [0, 8, 1e-6]}}
    machine.write_local(dataclasses.replace(CPU, op_times=second, cross_core_s_per_byte=2e-11), path)
    found = machine.with_measured(CPU, path)
    merged = {"linear": {"2x3": [1, 2, 0.5], "4x5": [3, 4, 0.75]}, "gelu": {"6": [0, 8, 1e-6]}}
    assert found.op_times == merged and found.cross_core_s_per_byte == 2e-11 and found.peak("float32") == 1e11


@pytest.mark.parametrize(
    "kept, wanted, used",
    [
        ("torch 2.13.0, 2 threads", "torch 2.13.0, 2 threads", True),
        ("torch 2.13.0, 2 threads", "torch 2.14.0, 2 threads", False),
        ("torch 2.13.0, 2 threads", "torch 2.13.0, 1 threads", False),
        ("torch 2.13.0, 2 threads", "torch 2.13.0", True),  # accounting.py does not ask torch for its threads
        ("torch 2.13.0, 2 threads", "torch 2.14.0", False),
        ("torch 2.13.0, 2 threads", "", True),  # no torch here
        ("", "torch 2.13.0, 2 threads", True),  # written by a version that did not keep the conditions
    ],
)
def test_figures_of_another_torch_or_number_of_threads_are_not_used(tmp_path, kept, wanted, used):
    path = tmp_path / "hardware.local.json"
    measured = dataclasses.replace(MEASURED, op_times={"linear": {"2x3": [1, 2, 0.5]}}, measured_with=kept)
    machine.write_local(measured, path)
    found = machine.with_measured(CPU, path, wanted)
    assert (found.peak("float32"), bool(found.op_times)) == ((1e11, True) if used else (None, False))
    machine.write_local(dataclasses.replace(found, bandwidth=3e10, measured_with=wanted), path)
    after = machine.read_local(path)[CPU.name]
    assert after.bandwidth == 3e10 and bool(after.op_times) == used  # written over, not mixed


def test_the_file_is_the_one_of_this_checkout_unless_another_is_named(local_file):
    assert not local_file.exists() and machine.read_local() == {} and machine.with_measured(CPU) == CPU
    machine.write_local(MEASURED)
    assert machine.read_local() == machine.read_local(local_file) == {MEASURED.name: MEASURED}
    assert machine.with_measured(CPU).peak("float32") == 1e11
    card = dataclasses.replace(MEASURED, name="a card", kind="cuda")
    machine.write_local(card)
    assert machine.local_device("auto") == machine.local_device("cuda:1") == card


def test_the_file_lies_at_the_root_of_the_checkout():
    code = "from hardware.machine import LOCAL_FILE; print(LOCAL_FILE)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(ROOT / "hardware.local.json")
    assert "/hardware.local.json" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_table_wins_over_the_file(tmp_path):
    path = tmp_path / "hardware.local.json"
    a100, h200_nvl = accelerator("a100"), accelerator("h200-nvl")
    for device in (a100, h200_nvl):
        peaks = {"float32": 1e12, "tf32": 2e12, "bfloat16": 3e12, "float16": 4e12}
        machine.write_local(dataclasses.replace(device, peak_flops=peaks, bandwidth=1e9, source="measured"), path)
    assert machine.with_measured(a100, path) == a100
    filled = machine.with_measured(h200_nvl, path)
    assert filled.peak("bfloat16") == 835.5e12 and filled.peak("tf32") == 2e12 and filled.bandwidth == 4800e9
    assert filled.source == f"{h200_nvl.source}; measured"


def test_a_device_of_the_same_name_but_another_kind_is_another_device(tmp_path):
    path = tmp_path / "hardware.local.json"
    machine.write_local(dataclasses.replace(MEASURED, kind="mps"), path)
    assert machine.with_measured(CPU, path) == CPU


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
        json.dumps({CPU.name: ENTRY | {"cross_core_s_per_byte": -1}}),
        json.dumps({CPU.name: ENTRY | {"link": "fast"}}),
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    path = tmp_path / "hardware.local.json"
    path.write_text(text)
    assert machine.read_local(path) == {} and machine.with_measured(CPU, path) == CPU
    machine.write_local(MEASURED, path)
    assert machine.read_local(path) == {MEASURED.name: MEASURED}


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    """What one core takes longer to read what another wrote was called "crossing"."""
    path = tmp_path / "hardware.local.json"
    entry = {name: value for name, value in ENTRY.items() if name != "cross_core_s_per_byte"}
    path.write_text(json.dumps({CPU.name: entry | {"crossing": 2.5e-11}}), encoding="utf-8")
    assert machine.read_local(path) == {CPU.name: dataclasses.replace(MEASURED, cross_core_s_per_byte=2.5e-11)}
    assert machine.with_measured(CPU, path).cross_core_s_per_byte == 2.5e-11
    machine.write_local(machine.read_local(path)[CPU.name], path)  # from then on by its name
    written = json.loads(path.read_text(encoding="utf-8"))[CPU.name]
    assert written["cross_core_s_per_byte"] == 2.5e-11 and "crossing" not in written


def test_no_file_is_no_measurement(tmp_path):
    assert machine.read_local(tmp_path / "none.json") == {}
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert machine.read_local(tmp_path / "bytes.json") == {}


# --- imports


@pytest.mark.parametrize("module", ["spec", "accelerators", "machine"])
def test_importing_hardware_imports_neither_torch_nor_numpy(module):
    code = f"import sys, hardware.{module}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
