"""Measure this machine and this project: python -m benchmarks COMMAND [CONFIG.py ...] [--name=value ...]

ceilings    the figures that accounting.py predicts with: FLOP/s of matmuls, bandwidths, seconds of single operations
train       tokens/s, MFU and memory of the trainer
optimizer   seconds of an AdamW step, compared with torch's AdamW
loader      seconds to read a batch from a large file
prepare     bytes/s of text turned into GPT-2's tokens, compared with tiktoken alone
decode      tokens/s generated after a long prompt
startup     seconds until train.py and accounting.py print something
"""

import ast
import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.shapes import SHAPES
from cli.errors import command, exit_on_mistake, require
from cli.flags import load
from config import Config

USAGE = "python -m benchmarks COMMAND [CONFIG.py ...]"


@dataclass(frozen=True)
class Options:
    """Measure this machine, and this project on it. COMMAND is one of the following.

    ceilings measures the FLOP/s of matmuls, the bandwidths, and the seconds of single operations. The operations are
    those of CONFIG.py if one is given, and otherwise those of a grid of shapes. accounting.py predicts with these
    figures; they are kept in hardware.local.json.

    train, optimizer, loader, prepare, decode and startup compare programs. In each repetition every program has one
    turn, after a warm-up that is not counted. The figures are medians over the repetitions, and `spread` is the
    smallest and the largest value. `ratio` is our speed divided by the other program's in the same repetition;
    `memory_ratio` is our memory divided by nanoGPT's.

    Without --shape, train takes tiny,small,gpt2 on a CPU and all five shapes on CUDA; optimizer and decode take gpt2.
    """

    json: bool = False  # print one JSON object, whose rows hold the same figures as the table
    record: str | None = None  # also write the figures to records/bench/NAME.json, with commit and environment
    peer: str | None = None  # train, loader, decode: the path of a nanoGPT checkout to compare with
    shape: str | None = None  # train, optimizer, decode: any of tiny,small,gpt2,gpt2_b32,xl
    repetitions: int = 5  # turns of each program
    steps: int | None = None  # train, optimizer, loader: steps in a turn; None: as many as take about 2 s
    gigabytes: float = 1.0  # loader: size of the file of tokens
    input: str | None = None  # prepare: text, as data/prepare.py takes it; None: the Python standard library
    workers: str | None = None  # prepare: numbers of processes, such as 1,2; None: data/prepare.py chooses


USES = {  # command -> its own options
    "ceilings": "",
    "train": "peer shape repetitions steps",
    "optimizer": "shape repetitions steps",
    "loader": "peer repetitions steps gigabytes",
    "prepare": "repetitions input workers",
    "decode": "peer shape repetitions",
    "startup": "repetitions",
}


def read_command(argv):
    """Return (command, config, options, whether a config was named), after checking all of them."""
    name = argv[0] if argv and not argv[0].startswith("-") else None
    config, options = load(argv[1:] if name else argv, Config, Options, USAGE)
    problem = f"unknown command {name}" if name else "no command given"
    require(name in USES, f"{problem}; write python -m benchmarks {' | '.join(USES)}")
    for field in fields(options):
        known = field.name in ("json", "record", *USES[name].split())
        require(known or getattr(options, field.name) == field.default, f"--{field.name} is not an option of {name}")
    named = config != Config(device=config.device)
    own = Config(**{key: getattr(config, key) for key in ("device", "dtype", "compile", "seed")})
    taken = "--device, --dtype, --compile and --seed"
    require(name == "ceilings" or config == own, f"{name} has its own shapes; of the settings it takes only {taken}")
    require(options.repetitions >= 1, f"--repetitions={options.repetitions} must be at least 1")
    require(options.steps is None or options.steps >= 1, f"--steps={options.steps} must be at least 1")
    require(options.gigabytes > 0, f"--gigabytes={options.gigabytes} must be positive")
    numbers = (options.workers or "1").split(",")
    are_numbers = all(re.fullmatch("[1-9][0-9]*", n) for n in numbers)
    require(are_numbers, f"--workers={options.workers} must be numbers separated by commas, such as 1,2")
    for shape in (options.shape or "tiny").split(","):
        require(
            shape in SHAPES, f"--shape={options.shape}: unknown shape {shape!r}; the shapes are {', '.join(SHAPES)}"
        )
    plain = options.record is None or re.fullmatch(r"\w[\w.-]*", options.record)
    require(plain, f"--record={options.record} must be a name without slashes; the file is records/bench/NAME.json")
    if options.peer is not None:
        check_peer(Path(options.peer))
    return name, config, options, named


def check_peer(path):
    """Raise ConfigError unless the folder is a nanoGPT checkout. Its files are only parsed here, not executed."""
    for file, used in (("model.py", {"GPT", "GPTConfig"}), ("train.py", {"get_batch"})):
        try:
            tree = ast.parse((path / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            tree = ast.Module([], [])
        missing = used - {getattr(node, "name", None) for node in tree.body}
        require(
            not missing,
            f"--peer={path}: not a nanoGPT checkout, it has no {file} that defines {' and '.join(sorted(missing))}; "
            "git clone https://github.com/karpathy/nanoGPT makes one",
        )


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    exit_on_mistake(read_command)

import torch

from benchmarks.ceilings import ceilings
from benchmarks.programs import prepare, startup
from benchmarks.records import write_rows
from benchmarks.show import ceiling_line, print_rows, table_line
from benchmarks.suite import decode, loader, optimizer, train
from measure.machine import find_device
from measure.memory import tune_allocator

COMMANDS = {
    "ceilings": ceilings, "train": train, "optimizer": optimizer, "loader": loader, "prepare": prepare,
    "decode": decode, "startup": startup,
}  # fmt: skip


@command
def main(argv):
    name, config, options, named = read_command(argv)
    tune_allocator()
    device, spec = find_device(config.device)
    rows = COMMANDS[name](config if named or name != "ceilings" else None, options, device, spec)
    environment = {"device": spec.name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    if not options.json:
        print(f"{spec.name}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        rows = print_rows(rows, ceiling_line if name == "ceilings" else table_line())
    rows = list(rows)
    if options.json:
        print(json.dumps({"command": name, **environment, "rows": rows}, indent=1))
    if options.record:
        write_rows(options, argv, environment, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
