"""The tasks that are measured, as a nanoGPT checkout does them.

No code of nanoGPT is copied. Its model is imported from the checkout, and get_batch is taken from the text of its
train.py. The loop around them does in each step what nanoGPT's own loop does, with the settings of its README: float32
and eager on a CPU, bfloat16 and compiled on CUDA.
"""

import ast
import importlib.abc
import importlib.util
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.ours import Training, random_prompt
from cli.errors import ConfigError
from model import build
from optimizer import learning_rate


class NanoGPTTraining:
    """nanoGPT's training step, on batches from its own get_batch."""

    def __init__(self, config, path):
        c, device = config, torch.device(config.device)
        self.config, self.step = c, 0
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
        self.model = nanogpt_model(c, path).to(device)
        self.optimizer = self.model.configure_optimizers(
            c.weight_decay, c.learning_rate, (c.beta1, c.beta2), device.type
        )
        self.autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
        self.forward = torch.compile(self.model) if device.type == "cuda" else self.model
        self.get_batch = nanogpt_get_batch(c, path)
        self.batch = self.get_batch("train")

    def run(self, n):
        losses = [self.train_step() for _ in range(n)]
        return {"losses": losses}

    def train_step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        with self.autocast:
            _, loss = self.forward(*self.batch)
        self.batch = self.get_batch("train")  # nanoGPT too gets the next batch before backward
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()


class NanoGPTBatches:
    """Batches from nanoGPT's get_batch."""

    def __init__(self, config, path):
        self.get_batch = nanogpt_get_batch(config, path)

    def run(self, n):
        for _ in range(n):
            self.get_batch("train")


class NanoGPTGeneration:
    """nanoGPT's generate with the weights of our model. top_k=1 selects the most likely token."""

    def __init__(self, config, path):
        self.model, self.prompt = nanogpt_model(config, path), random_prompt(config)
        ours = build(config)
        ours.init_weights(config.seed)
        with torch.no_grad():
            for own, other in matching_parameters(ours, self.model):
                other.copy_(own)
        self.model.to(config.device).eval()
        bfloat16 = torch.device(config.device).type == "cuda"
        self.autocast = torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16, enabled=bfloat16)

    def run(self, n):
        with self.autocast:
            ids = self.model.generate(self.prompt, n, temperature=1.0, top_k=1)
        return {"tokens": ids[0, self.prompt.shape[1] :].tolist()}


class SourceText(importlib.abc.InspectLoader):
    """An import loader of a module whose source is a text."""

    def __init__(self, text):
        self.text = text

    def get_source(self, name):
        return self.text


def nanogpt_model(config, path):
    """Return the checkout's model in the config's shape, with weights that the model has initialised itself."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclass looks the module up there
    spec.loader.exec_module(module)
    shape = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    return module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=config.bias))


def nanogpt_get_batch(config, path):
    """Return get_batch of the checkout's train.py, with the global variables that it reads.

    train.py is a script that trains when it is imported, so only the source of this function is executed.
    """
    text = (path / "train.py").read_text(encoding="utf-8")
    defined = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "get_batch"]
    spec = importlib.util.spec_from_loader("nanogpt_get_batch", SourceText(ast.get_source_segment(text, defined[0])))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device = torch.device(config.device)
    module.__dict__.update(
        os=os, np=np, torch=torch, data_dir=str(config.data_dir), block_size=config.block_size,
        batch_size=config.batch_size, device=config.device, device_type=device.type,
    )  # fmt: skip
    return module.get_batch


# Our parameters' names -> nanoGPT's. In both, weights have the shape (fan_out, fan_in), and queries, keys and values
# are one matrix.
NAMES = {
    r"^wte$": "transformer.wte.weight", r"^wpe$": "transformer.wpe.weight", r"^norm\.": "transformer.ln_f.",
    r"^blocks\.": "transformer.h.", r"\.norm1\.": ".ln_1.", r"\.norm2\.": ".ln_2.", r"\.attn\.qkv\.": ".attn.c_attn.",
    r"\.attn\.proj\.": ".attn.c_proj.", r"\.mlp\.up\.": ".mlp.c_fc.", r"\.mlp\.down\.": ".mlp.c_proj.",
}  # fmt: skip


def matching_parameters(ours, nanogpt):
    """Return a pair (ours, nanoGPT's) for each parameter; raise ConfigError if one has no counterpart."""
    theirs, pairs = dict(nanogpt.named_parameters()), []
    for name, p in ours.named_parameters():
        for pattern, replacement in NAMES.items():
            name = re.sub(pattern, replacement, name)
        found = theirs.get(name, theirs.get("lm_head.weight") if name == "transformer.wte.weight" else None)
        if found is None or found.shape != p.shape:
            raise ConfigError(f"its model has no {name} of shape {tuple(p.shape)}")
        pairs.append((p, found))
    rest = {id(p) for p in nanogpt.parameters()} - {id(found) for _, found in pairs}
    if rest:
        raise ConfigError(f"its model has {len(rest)} parameters more than a GPT-2 of this shape")
    return pairs


class Replay:
    """A loader that returns the batches appended to it."""

    def __init__(self):
        self.batches = []

    def next(self):
        return self.batches.pop(0)


def train_both(config, path: Path, n: int) -> list:
    """Train both for n steps from nanoGPT's initial weights on its batches; return (its loss, our loss) per step."""
    torch.manual_seed(config.seed)
    theirs, ours = NanoGPTTraining(config, path), Training(config)
    ours.loader.close()
    ours.loader = Replay()
    with torch.no_grad():
        for own, other in matching_parameters(ours.trainer.model, theirs.model):
            own.copy_(other)
    losses = []
    for _ in range(n):
        ours.loader.batches.append(theirs.batch)
        losses.append((theirs.train_step(), ours.train_step()))
    return losses
