"""Two sides that take turns, each in a process of its own: this project, and a nanoGPT checkout of the user's.

bench.py starts a Side per process. `python peer.py` is such a process: a JSON line on its stdin names what to set up,
each further one asks for a turn, and each is answered by a line. Nothing of the peer is copied here: its model is
imported from where it lies and its get_batch cut out of its train.py; the loop around them does per step what its own
does, as its README runs it: in float32 and eager on a CPU, compiled and in bfloat16 on CUDA.
"""

import ast
import contextlib
import dataclasses
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from config import ROOT, Config, ConfigError, require
from data.loader import Dataset, Loader
from measure import keep_freed_memory, process_memory, synchronize
from model import autocast, build
from optimizer import learning_rate
from trainer import Trainer

PAUSE = 0.3  # s after a turn: the threads of the side that ran spin for a while before they sleep
WARM_UP = 3  # steps before the first turn: memory is taken, a GPU's kernels are compiled
TURN_S = 2  # s that a turn takes where nothing says how many steps it has

# --- the process that asks


class Side:
    """A process that sets something up and then does it when asked to; it sleeps between its turns."""

    def __init__(self, task: str, config: Config, path: str | None = None):
        self.name = "the peer" if path else "napkin"
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "peer.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            encoding="utf-8",
        )  # fmt: skip
        try:
            self.ask({"task": task, "path": path, "config": dataclasses.asdict(config),
                      "threads": torch.get_num_threads()})  # fmt: skip
        except BaseException:
            self.close()
            raise

    def turn(self, n: int) -> dict:
        """Have it done n times in a row; return the figures: seconds in all, peak_bytes and what the task adds."""
        figures = self.ask({"n": n})
        time.sleep(PAUSE)
        return figures

    def ask(self, job: dict) -> dict:
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        require(line, f"{self.name}: its process ended with status {line or self.process.wait()}; is memory short?")
        reply = json.loads(line)
        require("error" not in reply, f"{self.name}: {reply.get('error')}")
        return reply

    def close(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # what it did not read any more
            self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


# --- turns


@contextlib.contextmanager
def sides_of(task: str, configs: list[Config], peer: str | None, n_tokens: int):
    """Give a Side per config of ours, and the peer's of the first one last, with random tokens as their data."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_tokens(Path(folder), configs[0].vocab_size, n_tokens)
        wanted = [(c, None) for c in configs] + ([(configs[0], os.path.abspath(peer))] if peer else [])
        yield [stack.enter_context(Side(task, dataclasses.replace(c, dataset=folder), path)) for c, path in wanted]


def write_tokens(folder: Path, vocab_size: int, n: int):
    """Write n random ids as a training split, a million of them over and over, and a short validation split."""
    ids = np.random.default_rng(0).integers(0, vocab_size, 2**20, dtype=np.uint16)
    with open(folder / "train.bin", "wb") as file:
        for start in range(0, n, len(ids)):
            file.write(ids[: n - start].tobytes())
    (folder / "val.bin").write_bytes(ids[:2048].tobytes())


def turns(runs: list, n: int | None, repetitions: int, before=None):
    """Return the steps of a turn, and per repetition what before() gave and what each of runs gave, one after another.

    run(n) takes n steps in a row and returns its seconds among other figures. A few steps before all that do not count;
    where n is None, they say how many make a turn.
    """
    for run in runs:
        run(WARM_UP)
    n = n or max(1, min(1000, round(TURN_S / runs[0](1)["seconds"])))
    found = []
    for _ in range(repetitions):
        first = before and before()
        time.sleep(PAUSE if before else 0)
        found.append((first, *(run(n) for run in runs)))
    return n, found


def spread(values) -> list:
    """Return the least and the most."""
    return [min(values), max(values)]


def compared(ours, theirs) -> dict:
    """Return by how much ours is faster, from the seconds of turns in pairs."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_spread": spread(ratios)}


# --- the process that answers


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which ends this one
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a peer prints is no answer
    import torch._dynamo  # torch's own AdamW loads it, 70 MB that are no model's memory

    side = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if side is None:
                torch.set_num_threads(job.pop("threads"))
                side, answer = set_up(**job), {}
            else:
                answer = turn(side, job["n"])
        except Exception as error:  # whatever a peer raises: the process that asked says it
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            answer = {"error": f"{kind}{error}"}
        print(json.dumps(answer), file=answers, flush=True)


def set_up(task: str, config: dict, path: str | None = None):
    """Return the object whose run(n) is a turn, of this project or of the checkout at path."""
    config = Config(**config)
    idle = idle_memory(torch.device(config.device))
    side = TASKS[task][path is not None](*([config] if path is None else [config, Path(path)]))
    side.device, side.idle = torch.device(config.device), idle
    return side


def turn(side, n: int) -> dict:
    """Run n times; return the seconds, the most memory since the process was idle, and what the run returns."""
    synchronize(side.device)
    start = time.perf_counter()
    figures = side.run(n) or {}
    synchronize(side.device)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": peak_memory(side.device) - side.idle, **figures}


def idle_memory(device: torch.device) -> int:
    """Return the bytes resident before a model is built, and forget an earlier peak; 0 on CUDA, where none are."""
    if device.type == "cuda":
        return 0
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the imports' own peak counts, a low one
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return process_memory(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far: allocated ones on CUDA, else resident ones of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) * 1024
    except (OSError, TypeError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --- this project


class Training:
    """Steps of trainer.py, as train.py takes them, but that each loss is read at once, as it is when it is logged."""

    def __init__(self, config):
        keep_freed_memory()
        device, self.step = torch.device(config.device), 0
        self.trainer = Trainer(config, device)
        if config.compile:
            _, trouble = self.trainer.compile()
            require(trouble is None, f"torch.compile failed: {trouble}")
        self.loader = Loader(Dataset(config), config, device, 0)

    def run(self, n):
        return {"losses": [self.train_step() for _ in range(n)]}

    def train_step(self) -> float:
        figures = self.trainer.step(self.step, self.loader)
        self.step += 1
        return figures["loss"].item()


class Batches:
    """A batch as a step gets it: ids from the memory map, and of them x and y."""

    def __init__(self, config):
        self.config, self.dataset, self.step = config, Dataset(config), 0

    def run(self, n):
        for _ in range(n):
            self.dataset.batch(self.config, self.step, 0).unbind()
            self.step += 1


class Writer:
    """sample.py's loop: n tokens behind a prompt, always the likeliest."""

    def __init__(self, config):
        self.config, self.model = config, build(config)
        self.model.init_weights(config.seed)
        self.model.to(config.device).eval()
        self.prompt = prompt(config)

    def run(self, n):
        ids, times = [], [time.perf_counter()]
        with autocast(self.config, torch.device(self.config.device)):
            for token in self.model.generate(self.prompt, n, temperature=0.0):
                ids.append(token.item())
                times.append(time.perf_counter())
        return {"tokens": ids, "prefill_s": times[1] - times[0], "step_s": float(np.median(np.diff(times)[1:]))}


def continued(config) -> tuple[int, int]:
    """Return how many tokens a prompt has, and how many are generated: 900 and 64 where the context has room."""
    n = min(64, config.block_size // 4)
    return min(900, config.block_size - n), n


def prompt(config):
    """Return random ids, (1, T), the same for both sides."""
    ids = np.random.default_rng(config.seed).integers(0, config.vocab_size, (1, continued(config)[0]))
    return torch.from_numpy(ids).to(config.device)


# --- the peer


class PeerTraining:
    """nanoGPT's step, over batches that its own function draws."""

    def __init__(self, config, path):
        c, device = config, torch.device(config.device)
        self.config, self.step = c, 0
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
        self.model = peer_model(c, path).to(device)
        self.optimizer = self.model.configure_optimizers(
            c.weight_decay, c.learning_rate, (c.beta1, c.beta2), device.type
        )
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
        self.forward = torch.compile(self.model) if device.type == "cuda" else self.model
        self.get_batch = peer_batches(c, path)
        self.batch = self.get_batch("train")

    def run(self, n):
        losses = [self.train_step() for _ in range(n)]
        return {"losses": losses}

    def train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        with self.autocast:
            _, loss = self.forward(*self.batch)
        self.batch = self.get_batch("train")  # before backward, as there
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()


class PeerBatches:
    def __init__(self, config, path):
        self.get_batch = peer_batches(config, path)

    def run(self, n):
        for _ in range(n):
            self.get_batch("train")


class PeerWriter:
    """Its generate, with the weights of our model, and top_k=1: always the likeliest token."""

    def __init__(self, config, path):
        self.model, self.prompt = peer_model(config, path), prompt(config)
        ours = build(config)
        ours.init_weights(config.seed)
        with torch.no_grad():
            for own, other in matched(ours, self.model):
                other.copy_(own)
        self.model.to(config.device).eval()
        bfloat16 = torch.device(config.device).type == "cuda"
        self.autocast = torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16, enabled=bfloat16)

    def run(self, n):
        with self.autocast:
            ids = self.model.generate(self.prompt, n, temperature=1.0, top_k=1)
        return {"tokens": ids[0, self.prompt.shape[1] :].tolist()}


TASKS = {"train": (Training, PeerTraining), "loader": (Batches, PeerBatches), "decode": (Writer, PeerWriter)}


class Text(importlib.abc.InspectLoader):
    """Import a module from its text."""

    def __init__(self, text):
        self.text = text

    def get_source(self, name):
        return self.text


def peer_model(config, path):
    """Return the checkout's model of the config's shape, its weights drawn by itself."""
    spec = importlib.util.spec_from_file_location("peer_model", path / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    shape = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    return module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=config.bias))


def peer_batches(config, path):
    """Return get_batch of the checkout's train.py, which is a script: this one function, and what it refers to."""
    text = (path / "train.py").read_text(encoding="utf-8")
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "get_batch"]
    spec = importlib.util.spec_from_loader("peer_batches", Text(ast.get_source_segment(text, defined[0])))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = torch.device(config.device)
    module.__dict__.update(
        os=os, np=np, torch=torch, data_dir=str(config.data_dir), block_size=config.block_size,
        batch_size=config.batch_size, device=config.device, device_type=device.type,
    )  # fmt: skip
    return module.get_batch


# Our parameters' names -> nanoGPT's: both multiply by (fan_out, fan_in), and queries, keys, values are one matrix.
NAMES = {
    r"^wte$": "transformer.wte.weight", r"^wpe$": "transformer.wpe.weight", r"^norm\.": "transformer.ln_f.",
    r"^blocks\.": "transformer.h.", r"\.norm1\.": ".ln_1.", r"\.norm2\.": ".ln_2.", r"\.attn\.qkv\.": ".attn.c_attn.",
    r"\.attn\.proj\.": ".attn.c_proj.", r"\.mlp\.up\.": ".mlp.c_fc.", r"\.mlp\.down\.": ".mlp.c_proj.",
}  # fmt: skip


def matched(ours, peer):
    """Return (our parameter, the peer's) for each of them."""
    theirs, pairs = dict(peer.named_parameters()), []
    for name, p in ours.named_parameters():
        for pattern, replacement in NAMES.items():
            name = re.sub(pattern, replacement, name)
        found = theirs.get(name, theirs.get("lm_head.weight") if name == "transformer.wte.weight" else None)
        if found is None or found.shape != p.shape:
            raise ConfigError(f"its model has no {name} of shape {tuple(p.shape)}")
        pairs.append((p, found))
    rest = {id(p) for p in peer.parameters()} - {id(found) for _, found in pairs}
    if rest:
        raise ConfigError(f"its model has {len(rest)} parameters more than a GPT-2 of this shape")
    return pairs


class Replay:
    """A loader of the batches that were put into it."""

    def __init__(self):
        self.batches = []

    def next(self):
        return self.batches.pop(0)


def follow(config, path: Path, n: int) -> list:
    """Return (its loss, ours) of n steps that start from its weights and see its batches."""
    torch.manual_seed(config.seed)
    theirs, ours = PeerTraining(config, path), Training(config)
    ours.loader.close()
    ours.loader = Replay()
    with torch.no_grad():
        for own, other in matched(ours.trainer.model, theirs.model):
            own.copy_(other)
    losses = []
    for _ in range(n):
        ours.loader.batches.append(theirs.batch)
        losses.append((theirs.train_step(), ours.train_step()))
    return losses


if __name__ == "__main__":
    main()
