"""Prompt to text, from a checkpoint alone: python sample.py OUT_DIR [--prompt=...]

Tokens appear as they come. The seed is sampling's own: the same --seed gives the same text, whatever training's was.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from config import Config, ConfigError, command, parse, require, resolve


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained model. OUT_DIR is a run's folder, or one of its step_* folders."""

    prompt: str | None = None  # text to continue; "-": read it from stdin; None: start from an end of text
    max_new_tokens: int = 500
    num_samples: int = 1  # how many continuations
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int | None = 200  # draw among the k likeliest; None: among all
    top_p: float | None = None  # draw among the likeliest that together have this probability; None: among all
    seed: int = 1337
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of matmuls; None: the one it was trained in


def read_options(argv):
    """Return (folder, options), checked."""
    words, flags = parse(argv, (Options,), "OUT_DIR")
    o = Options(**flags)
    require(
        len(words) == 1, f"one checkpoint folder is wanted, as in python sample.py out; got {' '.join(words) or 'none'}"
    )
    require(
        o.temperature >= 0, f"--temperature={o.temperature} must not be negative; 0 always takes the likeliest token"
    )
    require(o.top_k is None or o.top_k >= 1, f"--top_k={o.top_k} must be at least 1, or None")
    require(o.top_p is None or 0 < o.top_p <= 1, f"--top_p={o.top_p} must lie in (0, 1], or be None")
    require(0 <= o.seed < 2**63, f"--seed={o.seed} must lie in [0, 2**63)")
    require(o.max_new_tokens >= 1 and o.num_samples >= 1, "--max_new_tokens and --num_samples must be at least 1")
    return Path(words[0]), o


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    refused = command(lambda argv: read_options(argv) and None)()
    if refused:
        sys.exit(refused)

import codecs
import dataclasses
import math
import time

import torch

import checkpoint
from measure import find_device, synchronize
from model import autocast, build
from tokenizer import Tokenizer


@command
def main(argv):
    folder, options = read_options(argv)
    saved = checkpoint.load(folder)
    config = read_config(folder, saved["state"])
    device, record = find_device(options.device)
    config = resolve(dataclasses.replace(config, device="auto", dtype=options.dtype or config.dtype), record)
    tokenizer = Tokenizer(saved["state"]["tokenizer"])
    prompt = read_prompt(options.prompt)
    idx = torch.tensor([prompt_ids(prompt, tokenizer, config)], device=device)
    model = build(config)
    checkpoint.load_weights(model, saved["weights"])
    model.to(device).eval()
    describe(saved["state"], model, config)
    del saved

    generator = torch.Generator(device).manual_seed(options.seed)
    n_tokens, start = 0, time.perf_counter()
    for sample in range(options.num_samples):
        if sample:
            print("\n---------------", flush=True)
        print(prompt, end="", flush=True)
        characters = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may take several tokens
        with autocast(config, device):
            for token in model.generate(
                idx, options.max_new_tokens, options.temperature, options.top_k, options.top_p, generator
            ):
                n_tokens += 1
                if token.item() == tokenizer.eot:
                    break
                print(characters.decode(token_bytes(tokenizer, token.item())), end="", flush=True)
        print(characters.decode(b"", final=True), flush=True)
    synchronize(device)
    print(f"{n_tokens} tokens, {n_tokens / (time.perf_counter() - start):,.1f} tokens/s", file=sys.stderr)
    return 0


def read_config(folder, state):
    """Return the Config a checkpoint was trained with."""
    known = {field.name for field in fields(Config)}
    stored = state.get("config")
    require(
        isinstance(stored, dict) and "tokenizer" in state, f"{folder}: its state.json is not of this project: no config"
    )
    unknown = ", ".join(sorted(set(stored) - known))
    require(not unknown, f"{folder}: trained with settings this version does not know: {unknown}")
    return Config(**stored)


def read_prompt(prompt):
    """Return the text to continue, from the option or from stdin; "" where there is none."""
    try:
        return sys.stdin.read() if prompt == "-" else prompt or ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin is not {error.encoding} at byte {error.start}; convert it") from None


def prompt_ids(prompt, tokenizer, config):
    """Return the ids to start from: the prompt's, else an end of text, else the vocabulary's first token."""
    ids = tokenizer.encode(prompt)
    require(
        max(ids, default=0) < config.vocab_size,
        f"the prompt has id {max(ids, default=0)}, but the model's vocab_size is {config.vocab_size}",
    )
    return ids or [tokenizer.eot or 0]


def token_bytes(tokenizer, token):
    """Return a token's bytes; the ids that pad a vocabulary, and those it leaves out, stand for nothing."""
    try:
        return tokenizer.decode_bytes([token])
    except ConfigError:
        return b""


def describe(state, model, config):
    """Say which model speaks, so that an undertrained one is not taken for a bug."""
    n_params = sum(p.numel() for p in model.parameters())
    best = state.get("best_val_loss")
    loss = "not evaluated yet" if best is None else f"best validation loss {best:.4f}"
    print(
        f"step {state['step']}, {loss} (random is ln V = {math.log(config.vocab_size):.2f}), {n_params:,} parameters",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
