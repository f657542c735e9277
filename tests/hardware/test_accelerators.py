"""The table against clock x units x rate and against sparse figures; memory and names against what drivers report."""

import dataclasses

import pytest

from cli.errors import ConfigError
from config import Config, resolve
from hardware.accelerators import ACCELERATORS, ALIASES, DRIVER_NAMES, MEMORY, accelerator, match
from hardware.spec import CUDA_CONTEXT_BYTES, DeviceSpec

# --- the table


@pytest.mark.parametrize(
    "key, mhz, flops_per_clock, units, share",
    [  # boost clock, dense bfloat16 or float16 FLOPs per clock and unit, tensor cores or compute units; share of a card
        ("p100-sxm-16gb", 1480, 2 * 2, 3584, 1),  # its units are CUDA cores
        ("p100-pcie-16gb", 1303, 2 * 2, 3584, 1),
        ("v100-sxm-16gb", 1530, 64 * 2, 640, 1),
        ("t4", 1590, 64 * 2, 320, 1),
        ("rtx2080ti", 1545, 32 * 2, 68 * 8, 1),
        ("rtx8000", 1770, 64 * 2, 72 * 8, 1),
        ("a10", 1695, 128 * 2, 288, 1),
        ("a40", 1740, 128 * 2, 336, 1),
        ("a30", 1440, 256 * 2, 56 * 4, 1),
        ("a4000", 1560, 128 * 2, 48 * 4, 1),
        ("a5000", 1695, 128 * 2, 64 * 4, 1),
        ("a6000", 1800, 128 * 2, 336, 1),
        ("a100-40gb", 1410, 256 * 2, 432, 1),
        ("a100-pcie-80gb", 1410, 256 * 2, 432, 1),
        ("rtx3060-12gb", 1777, 64 * 2, 28 * 4, 1),
        ("rtx3070", 1725, 64 * 2, 46 * 4, 1),
        ("rtx3080-10gb", 1710, 64 * 2, 68 * 4, 1),
        ("rtx3090", 1695, 64 * 2, 328, 1),
        ("rtx4060ti", 2535, 64 * 2, 34 * 4, 1),
        ("rtx4070", 2475, 64 * 2, 46 * 4, 1),
        ("rtx4070-super", 2475, 64 * 2, 56 * 4, 1),
        ("rtx4070ti", 2610, 64 * 2, 60 * 4, 1),
        ("rtx4070ti-super", 2610, 64 * 2, 66 * 4, 1),
        ("rtx4080", 2505, 64 * 2, 76 * 4, 1),
        ("rtx4090", 2520, 64 * 2, 512, 1),
        ("rtx5070ti", 2452, 64 * 2, 70 * 4, 1),
        ("rtx5080", 2617, 64 * 2, 84 * 4, 1),
        ("rtx5090", 2407, 64 * 2, 170 * 4, 1),
        ("rtx-pro-6000", 2617, 128 * 2, 188 * 4, 1),
        ("rtx6000-ada", 2505, 128 * 2, 568, 1),
        ("l4", 2040, 128 * 2, 232, 1),
        ("h100-sxm", 1830, 512 * 2, 528, 1),
        ("h100-pcie", 1620, 512 * 2, 456, 1),
        ("h800", 1830, 512 * 2, 528, 1),
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
        ("a100-pcie-40gb", 624), ("a100-pcie-80gb", 624), ("a30", 330), ("a4000", 153.4), ("a5000", 222.2),
        ("rtx3070", 81.3), ("rtx3080-10gb", 119), ("rtx3090", 142), ("rtx4080", 194.9), ("rtx4090", 330.4),
        ("rtx5070ti", 175.8), ("rtx5080", 225.1), ("rtx5090", 419), ("rtx-pro-6000", 1007.6),
        ("rtx6000-ada", 728.5), ("l4", 242), ("l40", 362), ("l40s", 733), ("h20", 296), ("h100-sxm", 1979),
        ("h100-pcie", 1513), ("h100-nvl", 1671), ("h200", 1979), ("h200-nvl", 1671), ("gh200", 1979),
        ("b200", 4500), ("gb200", 5000), ("mi300x", 2614.9), ("mi325x", 2614.9),
    ],
)  # fmt: skip
def test_peak_is_half_of_the_sparse_figure(key, sparse):
    assert ACCELERATORS[key].peak("bfloat16") == pytest.approx(sparse * 1e12 / 2, rel=0.015)


@pytest.mark.parametrize("key, tops", [
    ("rtx4060ti", 353), ("rtx4070", 466), ("rtx4070-super", 568), ("rtx4070ti", 641), ("rtx4070ti-super", 706),
    ("rtx4080", 780), ("rtx4090", 1321),
])  # fmt: skip
def test_peak_of_ada_is_an_eighth_of_the_vendors_ai_tops(key, tops):
    """These are sparse FP8, added up in float16: each of the three doubles the rate."""
    assert ACCELERATORS[key].peak("bfloat16") == pytest.approx(tops * 1e12 / 8, rel=0.005)


@pytest.mark.parametrize(
    "key, mhz, cores",
    [
        ("p100-sxm-16gb", 1480, 3584),
        ("p100-pcie-16gb", 1303, 3584),
        ("rtx2080ti", 1545, 68 * 64),
        ("rtx8000", 1770, 72 * 64),
        ("a30", 1440, 56 * 64),
        ("a4000", 1560, 48 * 128),
        ("a5000", 1695, 64 * 128),
        ("rtx3060-12gb", 1777, 28 * 128),
        ("rtx3070", 1725, 46 * 128),
        ("rtx3080-10gb", 1710, 68 * 128),
        ("rtx4060ti", 2535, 34 * 128),
        ("rtx4070", 2475, 46 * 128),
        ("rtx4070-super", 2475, 56 * 128),
        ("rtx4070ti", 2610, 60 * 128),
        ("rtx4070ti-super", 2610, 66 * 128),
        ("rtx4080", 2505, 76 * 128),
        ("rtx5070ti", 2452, 70 * 128),
        ("rtx5080", 2617, 84 * 128),
        ("rtx-pro-6000", 2617, 188 * 128),
        ("h800", 1980, 132 * 128),
    ],
)
def test_float32_peak_is_clock_times_cores_times_two(key, mhz, cores):
    assert ACCELERATORS[key].peak("float32") == pytest.approx(mhz * 1e6 * cores * 2, rel=0.005)


@pytest.mark.parametrize("key", ACCELERATORS)
def test_rows_are_consistent(key):
    device = ACCELERATORS[key]
    assert set(device.peak_flops) <= set(device.dtypes)
    assert device.peak("bfloat16") in (device.peak("float16"), None) or device.kind == "tpu"
    assert device.source == "unknown" if not device.peak_flops else device.source
    assert device.memory_bytes is None or 7e9 <= device.memory_bytes <= 288e9
    assert device.bandwidth is None or 288e9 <= device.bandwidth <= 8000e9
    for slow, fast in [("float32", "tf32"), ("tf32", "bfloat16"), ("bfloat16", "fp8")]:
        if device.peak(slow) and device.peak(fast):
            assert 1 <= device.peak(fast) / device.peak(slow) < 15
    if device.peak("tf32"):
        assert device.peak("bfloat16") / device.peak("tf32") == pytest.approx(2, rel=0.02)
    if device.peak("fp8"):
        assert device.peak("fp8") / device.peak("bfloat16") == pytest.approx(2, rel=0.02)


BEFORE_AMPERE = [key for key in ACCELERATORS if key.startswith(("p100", "v100", "t4", "rtx20", "rtx8000"))]


@pytest.mark.parametrize("key", BEFORE_AMPERE)
def test_pascal_volta_and_turing_have_no_bfloat16(key):
    device = ACCELERATORS[key]
    assert device.has_matmul("float16") and device.has_matmul("float32") and not device.has_matmul("bfloat16")
    assert device.peak("bfloat16") is None
    assert resolve(Config(vocab_size=256), device).dtype == "float16"


def test_peak_follows_the_dtype_in_use():
    a100 = accelerator("a100-40gb")
    assert [a100.peak(dtype) for dtype in ("float32", "tf32", "bfloat16", "float16", "fp8")] == [
        19.5e12, 156e12, 312e12, 312e12, None
    ]  # fmt: skip
    assert a100.total_bytes == 40_339 * 2**20 and a100.bandwidth == 1555e9


def test_a_matmul_may_be_native_while_its_peak_is_unknown():
    device = accelerator("a10g")
    assert device.has_matmul("bfloat16") and device.peak("bfloat16") is None


def test_a_device_can_be_a_cache_key():
    assert hash(accelerator("h100")) == hash(accelerator("h100-sxm"))


# --- memory

NOMINAL_GIB = {
    "p100-sxm-16gb": 16, "p100-pcie-16gb": 16, "v100-sxm-16gb": 16, "v100-sxm-32gb": 32, "v100-pcie-16gb": 16,
    "v100-pcie-32gb": 32, "t4": 16, "rtx2080ti": 11, "rtx8000": 48, "a10": 24, "a10g": 24, "a30": 24, "a40": 48,
    "a4000": 16, "a5000": 24, "a6000": 48, "a100-40gb": 40, "a100-80gb": 80, "a100-pcie-40gb": 40,
    "a100-pcie-80gb": 80, "rtx3060-12gb": 12, "rtx3070": 8, "rtx3080-10gb": 10, "rtx3090": 24, "rtx4070": 12,
    "rtx4070ti-super": 16, "rtx4080": 16, "rtx4090": 24, "rtx5070ti": 16, "rtx5090": 32, "rtx6000-ada": 48,
    "rtx-pro-6000": 96, "l4": 24, "l40": 48, "l40s": 48, "h100-sxm": 80, "h100-pcie": 80, "h100-nvl": 94, "h200": 141,
    "b200": 180,
}  # fmt: skip
UNKNOWN_MEMORY = {
    "rtx4060ti", "rtx4070-super", "rtx4070ti", "rtx5080", "h20", "h20-141gb", "h800", "h200-nvl", "gh200", "gb200",
    "b300", "gb300", "mi250x", "mi300x", "mi325x", "mi355x", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e",
}  # fmt: skip


@pytest.mark.parametrize(
    "key, gib",
    [
        ("h100-sxm", 79.18), ("a100-80gb", 79.25), ("a100-40gb", 39.39), ("h200", 139.80), ("rtx4090", 23.52),
        ("t4", 14.75), ("l4", 22.03), ("a10g", 22.06), ("a40", 44.35), ("l40s", 44.40), ("v100-sxm-32gb", 31.73),
        ("rtx3090", 23.56), ("rtx5090", 31.36), ("a6000", 47.40), ("b200", 178.35), ("rtx-pro-6000", 94.97),
    ],
)  # fmt: skip
def test_the_total_is_what_cuda_reports(key, gib):
    assert round(ACCELERATORS[key].total_bytes / 2**30, 2) == gib


@pytest.mark.parametrize("key", NOMINAL_GIB)
def test_the_total_is_a_little_below_the_nominal_gib(key):
    """The driver keeps 1 to 2 %; ECC takes a sixteenth of GDDR memory where it is on."""
    assert 0.90 < ACCELERATORS[key].total_bytes / (NOMINAL_GIB[key] * 2**30) < 1


def test_no_total_is_guessed():
    known = {key for key, device in ACCELERATORS.items() if device.total_bytes is not None}
    assert known == set(NOMINAL_GIB) == set(MEMORY) and set(ACCELERATORS) - known == UNKNOWN_MEMORY
    assert all(ACCELERATORS[key].memory_bytes is None for key in UNKNOWN_MEMORY)
    assert all(source for _, source in MEMORY.values())


@pytest.mark.parametrize("key", NOMINAL_GIB)
def test_what_may_be_used_is_the_total_but_for_the_least_context(key):
    least, most = CUDA_CONTEXT_BYTES
    device = ACCELERATORS[key]
    assert least < most and device.memory_bytes == device.total_bytes - least


def test_a_device_written_before_there_was_a_total_is_read():
    device = accelerator("h100-sxm")
    entry = dataclasses.asdict(device)
    assert DeviceSpec.from_dict(entry) == device
    del entry["total_bytes"]
    assert DeviceSpec.from_dict(entry) == dataclasses.replace(device, total_bytes=None)


# --- names

REAL_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H20": "h20",
    "NVIDIA H20-3e": "h20-141gb",
    "NVIDIA H800": "h800",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
    "GeForce RTX 2080 Ti": "rtx2080ti",
    "NVIDIA GeForce RTX 3070": "rtx3070",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4060 Ti": "rtx4060ti",
    "NVIDIA GeForce RTX 4070": "rtx4070",
    "NVIDIA GeForce RTX 4070 SUPER": "rtx4070-super",
    "NVIDIA GeForce RTX 4070 Ti": "rtx4070ti",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070ti-super",
    "NVIDIA GeForce RTX 4080": "rtx4080",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti",
    "NVIDIA GeForce RTX 5080": "rtx5080",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": "l40",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A4000": "a4000",
    "NVIDIA RTX A5000": "a5000",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "Quadro RTX 8000": "rtx8000",
    "Tesla P100-SXM2-16GB": "p100-sxm-16gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
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
        "NVIDIA GeForce RTX 3060",  # which of 8 and 12 GB it is, the name does not say; 240 or 360 GB/s
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 3080",  # of 10 and 12 GB, with 68 or 70 multiprocessors
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 4060",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 5070",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
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
        "NVIDIA H800 PCIe",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Tesla P100-PCIE-12GB",
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
    ambiguous = {"rtx3060-12gb", "rtx3080-10gb"}
    with_driver = {key for key, device in ACCELERATORS.items() if device.kind == "cuda"}
    assert set(DRIVER_NAMES.values()) == with_driver - ambiguous and len(DRIVER_NAMES) == len(with_driver - ambiguous)


def test_short_names_say_which_variant_they_mean():
    assert set(ALIASES.values()) <= set(ACCELERATORS) and not set(ALIASES) & set(ACCELERATORS)
    assert accelerator("h100").name == "NVIDIA H100 SXM5 80 GB"
    assert accelerator("A100").name == "NVIDIA A100 SXM4 80 GB"
    assert accelerator("rtx3060").name == "NVIDIA RTX 3060 12 GB"
    assert accelerator("rtx3080").name == "NVIDIA RTX 3080 10 GB"
    assert accelerator("NVIDIA H100 PCIe") is accelerator("h100-pcie")


@pytest.mark.parametrize("name, near", [("h10", "h100"), ("a100-sxm-90gb", "a100-sxm"), ("rtx-4090x", "rtx4090")])
def test_unknown_gpu_names_the_nearest_and_the_way_out(name, near):
    with pytest.raises(ConfigError, match=f"--gpu={name}: not in the table; did you mean .*{near}.*--gpu takes one of"):
        accelerator(name)


def test_unknown_gpu_without_a_neighbour_lists_the_table():
    with pytest.raises(ConfigError, match=r"not in the table; --gpu takes one of p100-sxm-16gb, .*mi300x"):
        accelerator("???")
