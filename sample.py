"""Prompt to text, from a checkpoint alone: python sample.py OUT_DIR [--prompt=...]

Tokens appear as they come. The seed is sampling's own: the same --seed gives the same text, whatever training's was.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cli.errors import ConfigError, command, exit_on_mistake, require
from cli.flags import parse
from config import Config, resolve


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained model. OUT_DIR is a run's folder, or one of its step_* folders."""

    out_dir: str | None = None  # another way to name OUT_DIR
    prompt: str | None = None  # text to continue; FILE:prompt.txt reads a file, "-" reads stdin; None: a new text
    start: str | None = None  # another name of --prompt
    max_new_tokens: int = 500
    num_samples: int = 1  # how many continuations
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = 200  # draw among the k likeliest; None: among all
    top_p: float | None = None  # draw among the likeliest that together have this probability; None: among all
    seed: int = 1337
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of matmuls; None: the one it was trained in


def read(argv):
    """Return (folder, prompt or None, options), checked."""
    words, flags = parse(argv, (Options,), "python sample.py OUT_DIR")
    o = Options(**flags)
    folders = [*words, *filter(None, [o.out_dir])]
    require(len(folders) == 1, f"name one run's folder, as in python sample.py out; got {' '.join(folders) or 'none'}")
    require(o.prompt is None or o.start is None, "--prompt and --start are two names of one option: use one of them")
    positive = o.temperature >= 0
    require(positive, f"--temperature={o.temperature} must not be negative; 0 always takes the likeliest token")
    require(o.top_k is None or o.top_k >= 1, f"--top_k={o.top_k} must be at least 1, or None")
    require(o.top_p is None or 0 < o.top_p <= 1, f"--top_p={o.top_p} must lie in (0, 1], or be None")
    require(0 <= o.seed < 2**63, f"--seed={o.seed} must lie in [0, 2**63)")
    require(o.max_new_tokens >= 1 and o.num_samples >= 1, "--max_new_tokens and --num_samples must be at least 1")
    return Path(folders[0]), o.prompt if o.start is None else o.start, o


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    exit_on_mistake(read)

import math
import time

import torch

from data.tokenizer import Tokenizer
from measure.machine import find_device, synchronize
from model import build
from run import checkpoint
from run.text import stream


@command
def main(argv):
    folder, prompt, o = read(argv)
    saved = checkpoint.load(folder)
    config = read_config(folder, saved["state"])
    device, spec = find_device(o.device)
    config = resolve(replace(config, device="auto", dtype=o.dtype or config.dtype), spec)
    tokenizer = Tokenizer(saved["state"]["tokenizer"])
    prompt = read_prompt(prompt)
    ids = prompt_ids(prompt, tokenizer, config)
    model = build(config)
    checkpoint.load_weights(model, saved["weights"])
    model.to(device).eval()
    print_model(saved["state"], model, config)
    del saved

    generator = torch.Generator(device).manual_seed(o.seed)
    sampling = {"temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p, "end": tokenizer.eot}
    n_tokens, start = 0, time.perf_counter()
    for sample in range(o.num_samples):
        if sample:
            print("\n---------------", flush=True)
        print(prompt, end="", flush=True)
        for token, text in stream(model, config, tokenizer, ids, o.max_new_tokens, device, generator, **sampling):
            n_tokens += token is not None
            print(text, end="", flush=True)
        print(flush=True)
    synchronize(device)
    print(f"{n_tokens} tokens, {n_tokens / (time.perf_counter() - start):,.1f} tokens/s", file=sys.stderr)
    return 0


def read_config(folder, state):
    """Return the Config a checkpoint was trained with."""
    stored = state.get("config")
    complete = isinstance(stored, dict) and "tokenizer" in state
    require(complete, f"{folder}: its state.json is not of this project: no config")
    unknown = ", ".join(sorted(stored.keys() - Config.__dataclass_fields__.keys()))
    require(not unknown, f"{folder}: trained with settings this version does not know: {unknown}")
    return Config(**stored)


def read_prompt(prompt):
    """Return the text to continue: the option's, a file's (FILE:path) or stdin's (-); "" where there is none."""
    source = "stdin" if prompt == "-" else prompt
    try:
        if prompt == "-":
            return sys.stdin.read()
        if prompt and prompt.startswith("FILE:"):
            source = prompt.removeprefix("FILE:") or "FILE:"
            return Path(source).read_text(encoding="utf-8")
        return prompt or ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt in {source} is not {error.encoding} at byte {error.start}; convert it") from None
    except OSError as error:
        raise ConfigError(
            f"{source}: the prompt cannot be read ({error.strerror}); --prompt=TEXT gives it here"
        ) from None


def prompt_ids(prompt, tokenizer, config):
    """Return the ids to start from: the prompt's, else an end of text, else the vocabulary's first token."""
    ids = tokenizer.encode(prompt)
    largest, size = max(ids, default=0), config.vocab_size
    require(largest < size, f"the prompt has id {largest}, but the model's vocab_size is {size}")
    return ids or [tokenizer.eot or 0]


def print_model(state, model, config):
    """Print which model is loaded and its loss, so that an undertrained model is not mistaken for a bug."""
    n_params = sum(p.numel() for p in model.parameters())
    best = state.get("best_val_loss")
    loss = "not evaluated yet" if best is None else f"best validation loss {best:.4f}"
    guess = f"random is ln V = {math.log(config.vocab_size):.2f}"
    print(f"step {state['step']}, {loss} ({guess}), {n_params:,} parameters", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
