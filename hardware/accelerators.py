"""The table of accelerators, with the source of each figure, and how a card is found in it by name."""

import difflib
import re

from cli.errors import ConfigError
from hardware.spec import CUDA_CONTEXT_BYTES, DeviceSpec

# The dtypes in which the hardware of each generation multiplies matrices.
PASCAL = ("float32", "float16")  # also Volta and Turing, whose bfloat16 is emulated and slow
AMPERE = ("float32", "tf32", "bfloat16", "float16")
HOPPER = (*AMPERE, "fp8")  # also Ada, Blackwell and CDNA 3
CDNA2 = ("float32", "bfloat16", "float16")
CDNA4 = (*CDNA2, "fp8")  # without TF32
TPU = ("float32", "bfloat16")
# Where the peaks come from.
SHEET, HALVED = "the vendor's datasheet", "the vendor's datasheet, its sparse figures halved"
PAPER, DOCS = "the vendor's architecture whitepaper", "the vendor's documentation"
UNITS = "the vendor's boost clock x its tensor cores"
NO_TENSOR_CORES = "the vendor's datasheet; without tensor cores, float16 sums are in float16"
PRO_6000 = "rtx pro 6000 blackwell workstation edition"  # not the Server Edition or the Max-Q
_ = None  # the figure is not published, or sources disagree
TABLE = {
    # Columns: name; matmul dtypes; GB/s; TFLOP/s in float32, in tf32, in bfloat16 and float16 (with sums in float32),
    # in fp8; source of these; the driver's name of the card, or _ if cards with other figures have the same name.
    ("NVIDIA", "cuda"): {
        "p100-sxm-16gb": ("P100 SXM2 16 GB", PASCAL, 732, 10.6, _, 21.2, _, NO_TENSOR_CORES, "p100 sxm2 16gb"),
        "p100-pcie-16gb": ("P100 PCIe 16 GB", PASCAL, 732, 9.3, _, 18.7, _, NO_TENSOR_CORES, "p100 pcie 16gb"),
        "v100-sxm-16gb": ("V100 SXM2 16 GB", PASCAL, 900, 15.7, _, 125, _, SHEET, "v100 sxm2 16gb"),
        "v100-sxm-32gb": ("V100 SXM2 32 GB", PASCAL, 900, 15.7, _, 125, _, SHEET, "v100 sxm2 32gb"),
        "v100-pcie-16gb": ("V100 PCIe 16 GB", PASCAL, 900, 14, _, 112, _, SHEET, "v100 pcie 16gb"),
        "v100-pcie-32gb": ("V100 PCIe 32 GB", PASCAL, 900, 14, _, 112, _, SHEET, "v100 pcie 32gb"),
        "t4": ("T4", PASCAL, 320, 8.1, _, 65, _, SHEET, "t4"),
        "rtx2080ti": ("RTX 2080 Ti", PASCAL, 616, 13.4, _, 53.8, _, PAPER, "rtx 2080 ti"),
        "rtx8000": ("Quadro RTX 8000", PASCAL, 672, 16.3, _, 130.5, _, PAPER, "quadro rtx 8000"),
        "a10": ("A10", AMPERE, 600, 31.2, 62.5, 125, _, SHEET, "a10"),
        "a10g": ("A10G", AMPERE, 600, _, _, _, _, _, "a10g"),
        "a30": ("A30", AMPERE, 933, 10.3, 82, 165, _, SHEET, "a30"),
        "a40": ("A40", AMPERE, 696, 37.4, 74.8, 149.7, _, SHEET, "a40"),
        "a4000": ("RTX A4000", AMPERE, 448, 19.2, _, 76.7, _, HALVED, "rtx a4000"),
        "a5000": ("RTX A5000", AMPERE, 768, 27.8, _, 111.1, _, HALVED, "rtx a5000"),
        "a6000": ("RTX A6000", AMPERE, 768, 38.7, 77.4, 154.85, _, HALVED, "rtx a6000"),
        "a100-40gb": ("A100 SXM4 40 GB", AMPERE, 1555, 19.5, 156, 312, _, SHEET, "a100 sxm4 40gb"),
        "a100-80gb": ("A100 SXM4 80 GB", AMPERE, 2039, 19.5, 156, 312, _, SHEET, "a100 sxm4 80gb"),
        "a100-pcie-40gb": ("A100 PCIe 40 GB", AMPERE, 1555, 19.5, 156, 312, _, SHEET, "a100 pcie 40gb"),
        "a100-pcie-80gb": ("A100 PCIe 80 GB", AMPERE, 1935, 19.5, 156, 312, _, SHEET, "a100 80gb pcie"),
        "rtx3060-12gb": ("RTX 3060 12 GB", AMPERE, 360, 12.7, 12.7, 25.5, _, UNITS, _),  # the 8 GB card has 240 GB/s
        "rtx3070": ("RTX 3070", AMPERE, 448, 20.3, 20.3, 40.6, _, PAPER, "rtx 3070"),
        "rtx3080-10gb": ("RTX 3080 10 GB", AMPERE, 760, 29.8, 29.8, 59.5, _, PAPER, _),  # the 12 GB card has more units
        "rtx3090": ("RTX 3090", AMPERE, 936, 35.6, 35.6, 71, _, PAPER, "rtx 3090"),
        "rtx4060ti": ("RTX 4060 Ti, 8 or 16 GB", HOPPER, 288, 22.1, 22.1, 44.1, 88.2, UNITS, "rtx 4060 ti"),
        "rtx4070": ("RTX 4070", HOPPER, 504, 29.1, 29.1, 58.3, 116.6, UNITS, "rtx 4070"),
        "rtx4070-super": ("RTX 4070 SUPER", HOPPER, 504, 35.5, 35.5, 71, 142, UNITS, "rtx 4070 super"),
        "rtx4070ti": ("RTX 4070 Ti", HOPPER, 504, 40.1, 40.1, 80.2, 160.4, UNITS, "rtx 4070 ti"),
        "rtx4070ti-super": ("RTX 4070 Ti SUPER", HOPPER, 672, 44.1, 44.1, 88.2, 176.4, UNITS, "rtx 4070 ti super"),
        "rtx4080": ("RTX 4080", HOPPER, 717, 48.7, 48.7, 97.5, 194.9, PAPER, "rtx 4080"),
        "rtx4090": ("RTX 4090", HOPPER, 1008, 82.6, 82.6, 165.2, 330.3, PAPER, "rtx 4090"),
        "rtx5070ti": ("RTX 5070 Ti", HOPPER, 896, 43.9, _, 87.9, _, PAPER, "rtx 5070 ti"),
        "rtx5080": ("RTX 5080", HOPPER, 960, 56.3, _, 112.6, _, PAPER, "rtx 5080"),
        "rtx5090": ("RTX 5090", HOPPER, 1792, 104.8, _, 209.5, _, PAPER, "rtx 5090"),
        "rtx6000-ada": ("RTX 6000 Ada", HOPPER, 960, 91.1, _, 364.25, _, HALVED, "rtx 6000 ada generation"),
        "rtx-pro-6000": ("RTX PRO 6000 Workstation", HOPPER, 1792, 126, 251.9, 503.8, 1007.6, PAPER, PRO_6000),
        "l4": ("L4", HOPPER, 300, 30.3, 60, 121, 242.5, HALVED, "l4"),
        "l40": ("L40", HOPPER, 864, _, 90.5, 181.05, 362, SHEET, "l40"),
        "l40s": ("L40S", HOPPER, 864, 91.6, 183, 362.05, 733, SHEET, "l40s"),
        "h20": ("H20", HOPPER, 4000, 44, 74, 148, _, "the trade press", "h20"),
        "h20-141gb": ("H20 141 GB", HOPPER, 4800, 44, 74, 148, _, "the trade press", "h20 3e"),
        "h100-sxm": ("H100 SXM5 80 GB", HOPPER, 3350, 66.9, 494.7, 989.4, 1978.9, PAPER, "h100 80gb hbm3"),
        "h100-pcie": ("H100 PCIe 80 GB", HOPPER, 2000, 51.2, 378, 756, 1513, PAPER, "h100 pcie"),
        "h100-nvl": ("H100 NVL 94 GB", HOPPER, 3900, 60, 417.5, 835.5, 1670.5, HALVED, "h100 nvl"),
        "h800": ("H800 SXM5 80 GB", HOPPER, 3350, 66.9, 494.7, 989.4, 1978.9, "the H100's, whose units it has", "h800"),
        "h200": ("H200 SXM 141 GB", HOPPER, 4800, 66.9, 494.7, 989.4, 1978.9, HALVED, "h200"),
        "h200-nvl": ("H200 NVL 141 GB", HOPPER, 4800, _, _, 835.5, _, HALVED, "h200 nvl"),
        "gh200": ("GH200 96 GB", HOPPER, 4000, 66.9, 494.7, 989.4, 1978.9, HALVED, "gh200 480gb"),
        "b200": ("B200", HOPPER, 8000, 80, 1125, 2250, 4500, HALVED, "b200"),
        "gb200": ("GB200, one GPU", HOPPER, 8000, _, 1250, 2500, 5000, HALVED, "gb200"),
        "b300": ("B300", HOPPER, 8000, _, _, 2250, _, HALVED, "b300 sxm6 ac"),
        "gb300": ("GB300, one GPU", HOPPER, 8000, _, _, 2500, _, HALVED, "gb300"),
    },
    ("AMD", "cuda"): {  # torch's builds for ROCm call these devices "cuda"
        # An MI250X has two dies (GCDs). Each is a device for torch, with half of the card's 383 TFLOP/s and 3277 GB/s.
        "mi250x": ("MI250X, one GCD", CDNA2, 1638.4, _, _, 191.5, _, SHEET, "mi250x"),
        "mi300x": ("MI300X", HOPPER, 5300, 163.4, 653.7, 1307.4, 2614.9, SHEET, "mi300x"),
        "mi325x": ("MI325X", HOPPER, 6000, 163.4, 653.7, 1307.4, 2614.9, SHEET, "mi325x"),
        "mi355x": ("MI355X", CDNA4, 8000, _, _, 2516.6, 5033.2, SHEET, "mi355x"),
    },
    ("Google", "tpu"): {
        "tpu-v4": ("TPU v4, one chip", TPU, 1200, _, _, 275, _, DOCS, _),
        "tpu-v5e": ("TPU v5e, one chip", TPU, 819, _, _, 197, _, DOCS, _),
        "tpu-v5p": ("TPU v5p, one chip", TPU, 2765, _, _, 459, _, DOCS, _),
        "tpu-v6e": ("TPU v6e, one chip", TPU, 1638, _, _, 918, _, DOCS, _),
    },
}
LOGS = "logs of torch in public repositories"
# The total memory of a card in MiB, as CUDA reports it on Linux (torch's total_memory), and where the report was found.
# If recent drivers differ, the smallest value is taken. It is 1 to 2 % below the nominal GiB of the card, and ECC takes
# another sixteenth of GDDR memory. For a card that is not listed, no report was found. Its memory is unknown, because
# it does not follow from the vendor's GB.
MEMORY = {
    "p100-sxm-16gb": (16_280, LOGS),
    "p100-pcie-16gb": (16_280, LOGS),
    "v100-sxm-16gb": (16_160, LOGS),
    "v100-pcie-16gb": (16_160, LOGS),
    "v100-sxm-32gb": (32_494, "open-mmlab/mmdetection3d#697, liucongg/ChatGLM-Finetuning#73"),
    "v100-pcie-32gb": (32_494, "open-mmlab/mmdetection3d#697, liucongg/ChatGLM-Finetuning#73"),
    "t4": (15_102, "NVIDIA/DALI#1813"),
    "rtx2080ti": (11_019, "JDAI-CV/image-captioning#11"),
    "rtx8000": (48_588, "SkyworkAI/SkyReels-V1#78"),
    "a10": (22_579, LOGS),  # the logs say 22.1 GiB; this is the least that is rounded to it
    "a10g": (22_587, LOGS),
    "a30": (24_064, "LHRLAB/ChatKBQA#2"),
    "a40": (45_416, LOGS),
    "a4000": (15_985, "DengKaiCQ/VGGT-Long#6"),
    "a5000": (24_114, LOGS),
    "a6000": (48_538, LOGS),
    "a100-40gb": (40_339, "bottlerocket-os/bottlerocket#3873"),
    "a100-80gb": (81_151, "wbfwonderful/Vad-R1#11"),
    "a100-pcie-40gb": (40_326, LOGS),
    "a100-pcie-80gb": (81_049, "ekondis/mixbench#47"),
    "rtx3060-12gb": (11_931, LOGS),
    "rtx3070": (7_819, LOGS),
    "rtx3080-10gb": (10_015, "zai-org/CogVideo#34"),
    "rtx3090": (24_121, LOGS),
    "rtx4070": (11_866, LOGS),
    "rtx4070ti-super": (15_934, LOGS),
    "rtx4080": (16_049, LOGS),
    "rtx4090": (24_080, LOGS),
    "rtx5070ti": (15_842, LOGS),
    "rtx5090": (32_109, "Wan-Video/Wan2.1#465, aikitoria/open-gpu-kernel-modules#1"),
    "rtx6000-ada": (48_538, LOGS),
    "rtx-pro-6000": (97_250, "antirez/ds4#431"),
    "l4": (22_559, LOGS),
    "l40": (45_467, "QwenLM/Qwen3-VL#2097"),
    "l40s": (45_467, LOGS),
    "h100-sxm": (81_081, "karpathy/nanochat#443"),
    "h100-pcie": (81_008, LOGS),
    "h100-nvl": (95_232, "ali-vilab/VACE#56"),
    "h200": (143_156, LOGS),
    "b200": (182_631, LOGS),
}
ALIASES = {  # short name -> the card that it stands for
    "p100": "p100-sxm-16gb",
    "p100-sxm": "p100-sxm-16gb",
    "p100-pcie": "p100-pcie-16gb",
    "v100": "v100-sxm-16gb",
    "v100-sxm": "v100-sxm-16gb",
    "v100-pcie": "v100-pcie-16gb",
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "a100-sxm-40gb": "a100-40gb",
    "a100-sxm-80gb": "a100-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "h100": "h100-sxm",
    "h200-sxm": "h200",
    "rtx-a4000": "a4000",
    "rtx-a5000": "a5000",
    "rtx-a6000": "a6000",
    "rtx3060": "rtx3060-12gb",
    "rtx3080": "rtx3080-10gb",
    "rtx4060ti-16gb": "rtx4060ti",
}
# GB/s in one direction between the host's memory and the card, over 16 lanes of PCI Express 3, 4 or 5 (128 of 130 bits
# are data) or over NVLink-C2C.
LINKS = {
    15.75: "p100-sxm-16gb p100-pcie-16gb v100-sxm-16gb v100-sxm-32gb v100-pcie-16gb v100-pcie-32gb t4 rtx2080ti "
    "rtx8000 rtx4060ti",  # the RTX 4060 Ti has 8 lanes of PCI Express 4
    31.5: "a10 a10g a30 a40 a4000 a5000 a6000 a100-40gb a100-80gb a100-pcie-40gb a100-pcie-80gb rtx3060-12gb rtx3070 "
    "rtx3080-10gb rtx3090 rtx4070 rtx4070-super rtx4070ti rtx4070ti-super rtx4080 rtx4090 rtx6000-ada l4 l40 l40s "
    "mi250x",
    63: "rtx5070ti rtx5080 rtx5090 rtx-pro-6000 h20 h20-141gb h100-sxm h100-pcie h100-nvl h800 h200 h200-nvl b200 "
    "mi300x mi325x mi355x",
    450: "gh200 gb200",
}
BRANDS = {"nvidia", "tesla", "geforce", "amd", "instinct"}


def device_of_row(vendor, kind, key, row):
    """Return the DeviceSpec of a row of the table, in bytes, bytes/s and FLOP/s."""
    name, dtypes, gb_per_s, float32, tf32, half, fp8, source, _ = row
    tflops = {"float32": float32, "tf32": tf32, "bfloat16": half, "float16": half, "fp8": fp8}
    peaks = {dtype: round(tflops[dtype] * 1e12) for dtype in dtypes if tflops[dtype]}
    link_gb_per_s = next((gb for gb, keys in LINKS.items() if key in keys.split()), None)
    bandwidth, link = (x and round(x * 1e9) for x in (gb_per_s, link_gb_per_s))
    total = MEMORY[key][0] * 2**20 if key in MEMORY else None
    memory = total and total - CUDA_CONTEXT_BYTES[0]
    return DeviceSpec(
        f"{vendor} {name}", kind, memory, peaks, bandwidth, source or "unknown", dtypes, link, total_bytes=total
    )


ACCELERATORS = {key: device_of_row(*maker, key, row) for maker, rows in TABLE.items() for key, row in rows.items()}
DRIVER_NAMES = {row[-1]: key for rows in TABLE.values() for key, row in rows.items() if row[-1]}


def accelerator(name):
    """Return the DeviceSpec of a card. `name` is a key of the table, a short name, or the driver's name."""
    key = name.strip().lower()
    spec = ACCELERATORS.get(ALIASES.get(key, key)) or match(name)
    if spec is None:
        close = difflib.get_close_matches(key, [*ACCELERATORS, *ALIASES], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(
            f"--gpu={name}: not in the table; {hint}--gpu takes one of {', '.join(ACCELERATORS)}; describe any "
            "other card by --peak_flops, --bandwidth and --memory"
        )
    return spec


def match(device_name):
    """Return the DeviceSpec of the card whose driver's name is `device_name`; None if the table does not have it.

    A name with one more word is another device, such as a laptop's chip, a MIG slice, or a variant with fewer units or
    another clock.
    """
    words = re.findall(r"[\w.]+", device_name.lower())
    while words and words[0] in BRANDS:
        words.pop(0)
    key = DRIVER_NAMES.get(" ".join(words))
    return ACCELERATORS[key] if key else None
