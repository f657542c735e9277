"""Measure this machine and what runs on it: python bench.py COMMAND [CONFIG.py ...] [--name=value ...]

ceilings    what accounting.py reckons with: FLOP/s of matmuls by dtype and size, bandwidths, times of operations
train       tokens/s, MFU and memory of the trainer
optimizer   the step of AdamW, beside torch's own
loader      a batch from a large memory map
prepare     text to GPT-2's tokens, beside tiktoken alone
decode      tokens behind a long prompt
startup     seconds until train.py and accounting.py say something
"""

import ast
import json
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from config import ROOT, Config, command, load, require, resolve


@dataclass(frozen=True)
class Options:
    """Measure this machine. ceilings: FLOP/s of matmuls, bandwidths, and the times of single operations, those of the
    config if one is named, else of a grid of shapes; all of it is kept in hardware.local.json. train, optimizer,
    loader, prepare, decode, startup: medians over repetitions in which all that is compared takes turns, after one that
    does not count; `spread` is the least and the most. A ratio is that of speeds, ours over the other's, per turn;
    memory_ratio is ours over the peer's.
    """

    json: bool = False  # print an object whose rows carry the same figures
    record: str | None = None  # keep them in records/bench/NAME.json, with commit, command and environment
    peer: str | None = None  # train, loader, decode: a nanoGPT checkout, run in turns with ours
    shape: str | None = None  # train: of tiny,small,gpt2 (None: these), gpt2_b32,xl (None: on CUDA); optimizer, decode
    repetitions: int = 5  # turns of each side
    steps: int | None = None  # train, optimizer, loader: in a turn; None: as many as take 2 s
    gigabytes: float = 1.0  # loader: size of the memory map
    input: str | None = None  # prepare: text, as data/prepare.py takes it; None: Python's standard library
    workers: str | None = None  # prepare: processes to try, such as 1,2; None: what data/prepare.py does by itself


USES = {  # command -> its own options
    "ceilings": "",
    "train": "peer shape repetitions steps",
    "optimizer": "shape repetitions steps",
    "loader": "peer repetitions steps gigabytes",
    "prepare": "repetitions input workers",
    "decode": "peer shape repetitions",
    "startup": "repetitions",
}
# GPT-2's architecture without biases and dropout: blocks, heads, width, context, batch, vocabulary.
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "vocab_size")
SHAPES = {
    "tiny": (4, 4, 128, 64, 12, 65), "small": (6, 6, 384, 256, 8, 50304), "gpt2": (12, 12, 768, 1024, 1, 50304),
    "gpt2_b32": (12, 12, 768, 1024, 32, 50304), "xl": (48, 25, 1600, 1024, 4, 50304),
}  # fmt: skip


def read_command(argv):
    """Return (command, config, options, whether a config was named), checked."""
    name = argv[0] if argv and not argv[0].startswith("-") else None
    config, options = load(argv[1:] if name else argv, Options, "COMMAND [CONFIG.py ...]")
    require(name in USES, f"a command is wanted: python bench.py {' | '.join(USES)}; got {name or 'none'}")
    for field in fields(options):
        known = field.name in ("json", "record", *USES[name].split())
        require(known or getattr(options, field.name) == field.default, f"--{field.name}: {name} does nothing with it")
    named = config != Config(device=config.device)
    own = Config(**{key: getattr(config, key) for key in ("device", "dtype", "compile", "seed")})
    require(name == "ceilings" or config == own, f"{name} has its own shapes; it takes --device, --dtype and --seed")
    require(options.repetitions >= 1, f"--repetitions={options.repetitions} must be at least 1")
    require(options.steps is None or options.steps >= 1, f"--steps={options.steps} must be at least 1")
    require(options.gigabytes > 0, f"--gigabytes={options.gigabytes} must be positive")
    numbers = (options.workers or "1").split(",")
    require(all(re.fullmatch("[1-9][0-9]*", n) for n in numbers), f"--workers={options.workers}: numbers such as 1,2")
    for shape in (options.shape or "tiny").split(","):
        require(shape in SHAPES, f"--shape={options.shape}: there are {', '.join(SHAPES)}")
    plain = options.record is None or re.fullmatch(r"\w[\w.-]*", options.record)
    require(plain, f"--record={options.record}: a name without slashes is wanted; records/bench/NAME.json is written")
    if options.peer is not None:
        check_peer(Path(options.peer))
    return name, config, options, named


def check_peer(path):
    """Refuse a path where no nanoGPT lies: what is used of it is looked for, and nothing run."""
    for file, wanted in (("model.py", {"GPT", "GPTConfig"}), ("train.py", {"get_batch"})):
        try:
            tree = ast.parse((path / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            tree = ast.Module([], [])
        missing = wanted - {getattr(node, "name", None) for node in tree.body}
        require(
            not missing,
            f"--peer={path}: no nanoGPT checkout, there is no {file} with {' and '.join(sorted(missing))}; "
            "git clone https://github.com/karpathy/nanoGPT makes one",
        )


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    refused = command(lambda argv: read_command(argv) and None)()
    if refused:
        sys.exit(refused)

import contextlib
import os
import shlex
import statistics
import subprocess
import tempfile
import time
from functools import partial

import numpy as np
import torch

import hardware
import tokenizer
from hardware import operation_dtype
from measure import (
    copy_bandwidth,
    crossing_seconds,
    find_device,
    host_bandwidth,
    keep_freed_memory,
    matmul_flops,
    synchronize,
)
from model import build
from optimizer import AdamW, parameter_groups
from peer import compared, continued, sides_of, spread, turns, write_tokens
from prediction import predict
from schedule import SIZES as BYTES
from schedule import schedule
from timing import not_timed, time_operations
from units import mib, si

RECORDS = ROOT / "records" / "bench"

# Shapes from which those of other configs are estimated: width, heads, context, batch, vocabulary.
SIZES = [
    (64, 4, 64, 4, 65), (128, 4, 128, 8, 256), (256, 4, 256, 4, 4096), (384, 6, 256, 8, 1000),
    (512, 8, 512, 2, 16384), (768, 12, 1024, 1, 50304),
]  # fmt: skip
KINDS = [
    {},
    {"norm": "rmsnorm", "pos": "rope", "activation": "swiglu", "n_kv_head": 2, "tie_weights": False},
    {"norm": "rmsnorm", "pos": "rope", "activation": "relu2", "qk_norm": True, "dropout": 0.1, "tie_weights": False},
    {"model": "mlp"},
]


@command
def main(argv):
    name, config, options, named = read_command(argv)
    keep_freed_memory()
    device, record = find_device(config.device)
    rows = COMMANDS[name](config if named or name != "ceilings" else None, options, device, record)
    environment = {"device": record.name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if not options.json:
        print(f"{record.name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        rows = shown(rows, ceiling_line if name == "ceilings" else columns())
    rows = list(rows)
    if options.json:
        print(json.dumps({"command": name, **environment, "rows": rows}, indent=1))
    if options.record:
        keep(options, argv, environment, rows)
    return 0


# --- what is printed and kept


def shown(rows, line):
    """Yield the rows, each printed when it is there."""
    for row in rows:
        print(line(row), flush=True)
        yield row


def ceiling_line(row):
    return f"  {row['what']:<44}{si(row['value'], row['unit']):>16}"


def columns():
    """Return what makes a line of a row; before the first one a line of titles, whose widths all others have."""
    widths = {}

    def line(row):
        cells = {key: cell(key, value) for key, value in row.items()}
        first = not widths
        if first:
            least = {k: {str: 16, list: 18}.get(type(value), 8) for k, value in row.items()}
            widths.update({k: max(least[k], len(k), len(text)) + 2 for k, text in cells.items()})
        lines = [{key: key for key in cells}, cells] if first else [cells]
        return "\n".join(
            "".join(texts[k].ljust(w) if isinstance(row[k], str) else texts[k].rjust(w) for k, w in widths.items())
            for texts in lines
        ).rstrip()

    return line


FORMS = {
    "tokens_per_s": "{:,.0f}".format, "bytes_per_s": lambda x: si(x, "B/s"), "_bytes": mib, "_s": "{:.4g}".format,
    "seconds": "{:.4g}".format, "ratio": "{:.3f}".format, "mfu": "{:.1%}".format, "mbu": "{:.1%}".format,
}  # fmt: skip


def cell(key, value):
    """Return a figure as text, in the unit that its key names."""
    if value is None or isinstance(value, (str, bool)):
        return {None: "-", True: "yes", False: "no"}.get(value, value)
    if isinstance(value, list):
        return "..".join(f"{x:.3g}" for x in value)
    return next((form(value) for ending, form in FORMS.items() if key.endswith(ending)), f"{value:,}")


def keep(options, argv, environment, rows):
    """Write records/bench/NAME.json."""
    if options.peer:
        environment = environment | {"peer": git(options.peer, "rev-parse", "HEAD")}
    # where a checkout or a text lies is its user's own
    command = shlex.join(["python", "bench.py", *(re.sub(r"^(--(?:peer|input)=).*", r"\1PATH", a) for a in argv)])
    write_record(RECORDS / f"{options.record}.json", command, environment, {"rows": rows})


def write_record(path, command, environment, content):
    """Write what was measured, with the commit that measured it, the command, the time and the environment."""
    changed = git(ROOT, "status", "--porcelain", "--", "*.py", ":!records/*/config.py")  # which is a record itself
    record = {
        "commit": git(ROOT, "rev-parse", "HEAD") + (" with uncommitted changes" if changed else ""),
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "environment": environment,
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def git(folder, *arguments):
    """Return what git says of a folder; nothing where there is no git."""
    done = subprocess.run(["git", "-C", folder, *arguments], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


# --- ceilings


def grid(record):
    """Yield small configs of many shapes."""
    for width, heads, context, batch, vocabulary in SIZES:
        shape = {"n_layer": 1, "n_head": heads, "n_embd": width, "block_size": context, "batch_size": batch}
        shape |= {"vocab_size": vocabulary, "gradient_accumulation_steps": 2}
        yield from (resolve(Config(**shape, **kind), record) for kind in KINDS)


def ceilings(config, options, device, record):
    """Yield what was measured, row by row, and keep it."""
    sizes = (256, 512, 1024, 2048) if device.type == "cpu" else (1024, 2048, 4096, 8192)
    peaks = {}
    for dtype in (dtype for dtype in ("float32", "bfloat16", "float16") if record.has_matmul(dtype)):
        for n in sizes:
            peaks[dtype] = matmul_flops(device, dtype, n)  # that of the largest stays
            yield {"what": f"matmul of {n} cubed, {dtype}", "value": peaks[dtype], "unit": "FLOP/s"}
    bandwidth = copy_bandwidth(device)
    yield {"what": "copy, bytes read and written", "value": bandwidth, "unit": "B/s"}
    crossing, link = crossing_seconds(device), None
    if crossing:
        yield {"what": "one core reading what another wrote, beyond its own", "value": crossing, "unit": "s/B"}
    if device.type == "cuda":
        for pinned in (False, True):
            link = host_bandwidth(device, pinned)
            yield {"what": f"host to device, {'pinned' if pinned else 'pageable'}", "value": link, "unit": "B/s"}
    found = {"peak_flops": peaks, "bandwidth": bandwidth}
    if device.type != "cpu":  # a vendor's figures stay what utilisation is a fraction of
        found = {"peak_flops": peaks | record.peak_flops, "bandwidth": record.bandwidth or bandwidth}
    source = f"measured here: matmul of {sizes[-1]} cubed" if record.source == "unknown" else record.source
    record = replace(record, **found, link=link, crossing=crossing, source=source, op_times={})
    configs = [resolve(config, record)] if config else grid(record)
    ops = not_timed([op for c in configs for op in schedule(c, record).ops], record)
    record = time_operations(ops.values(), device, record)
    hardware.write_local(record)
    yield {"what": "operations timed", "value": len(ops), "unit": ""}


# --- sides that take turns


def shapes(config, options, device, record, default):
    """Yield (name, resolved config) of the shapes that are asked for."""
    for name in (options.shape or default).split(","):
        shape = dict(zip(SHAPE, SHAPES[name], strict=True))
        yield name, resolve(replace(config, **shape, gradient_accumulation_steps=1), record)


def ceiling(device, record, dtype):
    """Return what utilisation is a fraction of, FLOP/s: of a CPU what a matmul of 2,048 cubed attains at the moment."""
    return (device.type != "cpu" and record.peak(dtype)) or matmul_flops(device, dtype, 2048)


def train(config, options, device, record):
    """Yield a row per shape: the trainer's tokens/s, seconds per step, MFU and memory."""
    default = "tiny,small,gpt2,gpt2_b32,xl" if device.type == "cuda" else "tiny,small,gpt2"
    for name, c in shapes(config, options, device, record, default):
        flops = predict(c, record)["flops"]["per_step"]
        with sides_of("train", [c], options.peer, 2**20) as sides:
            peak = partial(ceiling, device, record, c.dtype)
            n, found = turns([side.turn for side in sides], options.steps, options.repetitions, peak)
        ours = [a["seconds"] / n for _, a, *_ in found]
        step_s, peak_bytes = statistics.median(ours), found[-1][1]["peak_bytes"]
        row = {
            "shape": name,
            "dtype": c.dtype,
            "tokens_per_s": c.tokens_per_step / step_s,
            "step_s": step_s,
            "spread": spread(ours),
            "mfu": statistics.median(flops / s / most for s, (most, *_) in zip(ours, found, strict=True)),
            "peak_bytes": peak_bytes,
        }
        if options.peer:
            theirs = [b["seconds"] / n for *_, b in found]
            row |= {"peer_tokens_per_s": c.tokens_per_step / statistics.median(theirs), **compared(ours, theirs)}
            row |= {"peer_peak_bytes": found[-1][2]["peak_bytes"]}
            row |= {"memory_ratio": peak_bytes / row["peer_peak_bytes"]}
        yield row


def optimizer(config, options, device, record):
    """Yield a row per shape: seconds of our AdamW's step, as train.py calls it, and of torch's, fused and foreach."""

    def timed(step):
        def run(n):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(n):
                step()
            synchronize(device)
            return {"seconds": time.perf_counter() - start}

        return run

    for name, c in shapes(config, options, device, record, "gpt2"):
        model = build(c)
        model.init_weights(c.seed)
        model.to(device)
        for p in model.parameters():
            p.grad = torch.randn_like(p).mul_(1e-3)
        betas, scale, finite = (c.beta1, c.beta2), torch.ones((), device=device), torch.tensor(True, device=device)
        own = AdamW(parameter_groups(model, c.weight_decay), c.learning_rate, betas, compiled=c.compile_optimizer)
        fused, foreach = (
            torch.optim.AdamW(parameter_groups(model, c.weight_decay), c.learning_rate, betas, **kind)
            for kind in ({"fused": True}, {"foreach": True})
        )
        runs = [timed(step) for step in (partial(own.step, scale, finite), fused.step, foreach.step)]
        n, found = turns(runs, options.steps, options.repetitions)
        ours, fused, foreach = ([figures[i]["seconds"] / n for figures in found] for i in (1, 2, 3))
        yield {
            "shape": name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_s": statistics.median(ours),
            "spread": spread(ours),
            "fused_s": statistics.median(fused),
            **compared(ours, fused),
            "foreach_s": statistics.median(foreach),
            "foreach_ratio": compared(ours, foreach)["ratio"],
        }


def loader(config, options, device, record):
    """Yield one row: seconds until a batch of 12 x 1,024 tokens is there."""
    shape = {"vocab_size": 50304, "block_size": 1024, "batch_size": 12, "gradient_accumulation_steps": 1}
    c, n_tokens = resolve(replace(config, **shape), record), int(options.gigabytes * 1e9) // 2
    with sides_of("loader", [c], options.peer, n_tokens) as sides:
        n, found = turns([side.turn for side in sides], options.steps, options.repetitions)
    ours = [a["seconds"] / n for _, a, *_ in found]
    row = {"shape": "B12 T1024", "file_bytes": 2 * n_tokens, "batch_s": statistics.median(ours), "spread": spread(ours)}
    if options.peer:
        theirs = [b["seconds"] / n for *_, b in found]
        row |= {"peer_batch_s": statistics.median(theirs), **compared(ours, theirs)}
    yield row


def decode(config, options, device, record):
    """Yield a row per shape and dtype: tokens/s behind a prompt, prompt and all, and of a single token MBU.

    MBU: the bytes of weights and cache that a token reads, over its seconds and the bandwidth that a copy attains.
    """
    for name, c in shapes(config, options, device, record, "gpt2"):
        (prompt, n), dtypes = continued(c), dict.fromkeys(["float32", c.dtype])
        configs = [replace(c, dtype=dtype) for dtype in dtypes]
        with sides_of("decode", configs, options.peer, 2**12) as sides:
            bandwidth = partial(copy_bandwidth, device)
            n, found = turns([side.turn for side in sides], n, options.repetitions, bandwidth)
        for i, c in enumerate(configs, 1):
            p = predict(c, record)
            n_bytes = p["model"]["params_matmul"] * BYTES[operation_dtype("row product", c.dtype, device.type)]
            n_bytes += p["memory"]["kv_cache_per_token"] * (prompt + n // 2)
            ours, step_s = [figures[i]["seconds"] for figures in found], [figures[i]["step_s"] for figures in found]
            row = {
                "shape": name,
                "dtype": c.dtype,
                "tokens_per_s": n / statistics.median(ours),
                "seconds": statistics.median(ours),
                "spread": spread(ours),
                "prefill_s": statistics.median(figures[i]["prefill_s"] for figures in found),
                "step_s": statistics.median(step_s),
                "mbu": statistics.median(n_bytes / s / figures[0] for s, figures in zip(step_s, found, strict=True)),
            }
            if options.peer:
                theirs = [figures[-1]["seconds"] for figures in found]
                row |= {"peer_tokens_per_s": n / statistics.median(theirs), **compared(ours, theirs)}
                row |= {"same_tokens": found[-1][i]["tokens"] == found[-1][-1]["tokens"]}
            yield row


# --- programs as a whole


def prepare(config, options, device, record):
    """Yield a row per number of processes: bytes/s of data/prepare.py, start and all, and of tiktoken alone."""
    vocabulary, name = tokenizer.load("gpt2"), "text" if options.input else "stdlib"
    choices = list(dict.fromkeys(map(int, options.workers.split(",")))) if options.workers else [None]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / name
        line = [sys.executable, ROOT / "data" / "prepare.py", target, "--tokenizer=gpt2"]
        line += [f"--input={os.path.abspath(options.input)}"] if options.input else []
        lines = [line + ([f"--workers={n}"] if n else []) for n in choices]
        peaks = [watched(each) for each in lines]  # not in the timed runs: to look takes time of a core
        texts = pieces(target, vocabulary)
        meta = json.loads((target / "meta.json").read_text(encoding="utf-8"))
        size = sum(split["bytes"] for split in meta["splits"].values())
        found = {n: [] for n in choices}
        for _ in range(options.repetitions):
            for n, each in zip(choices, lines, strict=True):
                start = time.perf_counter()
                check_ended(each, subprocess.run(each, stdout=subprocess.DEVNULL, check=False).returncode)
                between = time.perf_counter()
                vocabulary.encode_ordinary_batch(texts, num_threads=n or torch.get_num_threads())
                found[n].append((between - start, time.perf_counter() - between))
    for (n, figures), peak in zip(found.items(), peaks, strict=True):
        ours, alone = zip(*figures, strict=True)
        yield {
            "workers": n,
            "text_bytes": size,
            "bytes_per_s": size / statistics.median(ours),
            "seconds": statistics.median(ours),
            "spread": spread(ours),
            "peak_bytes": peak,
            "tiktoken_bytes_per_s": size / statistics.median(alone),
            **compared(ours, alone),
        }


def pieces(folder, vocabulary):
    """Return the text behind prepared tokens, in pieces that keep every thread of tiktoken busy."""
    texts = []
    for file in ("train.bin", "val.bin"):
        ids = np.fromfile(folder / file, dtype="<u2")
        documents = np.split(ids, np.flatnonzero(ids == vocabulary.eot_token) + 1)
        texts += [vocabulary.decode([i for i in d.tolist() if i != vocabulary.eot_token]) for d in documents]
    return [text[i : i + 2**16] for text in texts for i in range(0, len(text), 2**16)]


def watched(line):
    """Run a command; return the most memory that it and its children held at once, shared pages once.

    That is looked up every 20 ms; it is 0 on systems without /proc.
    """
    most = 0
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            most = max(most, sum(map(proportional_bytes, tree(process.pid))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
    finally:
        process.kill()
    check_ended(line, process.returncode)
    return most


def check_ended(line, status):
    require(status == 0, f"{' '.join(map(str, line[1:]))} failed; its message stands above")


def tree(pid):
    """Yield a process and its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text(encoding="ascii").split():
                yield from tree(int(child))


def proportional_bytes(pid):
    """Return the memory of a process, with its part of the pages that it shares; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        return int(re.search(r"^Pss:\s*(\d+)", text, re.M)[1]) * 1024
    except (OSError, TypeError):
        return 0


def startup(config, options, device, record):
    """Yield a row per program: seconds from its start to its first line, to the first step, and to its end."""
    tiny = [f"--{name}={value}" for name, value in zip(SHAPE, SHAPES["tiny"], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder), 65, 2**16)
        few = ["--max_iters=1", "--eval_iters=1", "--sample_tokens=0", "--gradient_accumulation_steps=1"]
        places = [f"--dataset={folder}", f"--out_dir={folder}/out", f"--device={config.device}", "--overwrite"]
        programs = {
            "import torch": ["-c", "import torch"],
            "train.py tiny": ["train.py", *tiny, *few, *places],
            "accounting.py": ["accounting.py", "configs/gpt2.py", "--gpu=a100-40gb"],
        }
        rounds = [{name: milestones(line) for name, line in programs.items()} for _ in range(1 + options.repetitions)]
    for program in programs:
        first_line, first_step, end = zip(*(found[program] for found in rounds[1:]), strict=True)
        yield {
            "program": program,
            "first_line_s": first_line[0] and statistics.median(first_line),
            "first_step_s": first_step[0] and statistics.median(first_step),
            "end_s": statistics.median(end),
            "spread": spread(end),
        }


def milestones(line):
    """Return the seconds until a program's first line, its first step, and its end; None for what does not come."""
    start, first_line, first_step = time.perf_counter(), None, None
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, *line], cwd=ROOT, stdout=subprocess.PIPE, env=environment, text=True)
    with process:
        for text in process.stdout:
            now = time.perf_counter() - start
            first_line = first_line or now
            first_step = first_step or (now if text.startswith("step 1/") else None)
    require(process.returncode == 0, f"{line[0]} failed; its message stands above")
    return first_line, first_step, time.perf_counter() - start


COMMANDS = {
    "ceilings": ceilings, "train": train, "optimizer": optimizer, "loader": loader, "prepare": prepare,
    "decode": decode, "startup": startup,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
