"""The tasks that are measured, as this project does them: training, loading batches, generation."""

import time

import numpy as np
import torch

from cli.errors import require
from data.loader import Dataset, Loader
from measure.memory import release_freed_memory, tune_allocator
from model import autocast, build
from optimizer import compiled_update
from trainer import Trainer


class Training:
    """The steps of trainer.py, taken as train.py takes them. Each loss is read at once, as when it is logged."""

    def __init__(self, config):
        device, self.step = torch.device(config.device), 0
        if config.compile_optimizer:
            compiled_update(device)
        release_freed_memory()  # the compiler's, as in a run
        tune_allocator()
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
    """Batches as a training step receives them: x and y, cut from the file of tokens."""

    def __init__(self, config):
        self.config, self.dataset, self.step = config, Dataset(config), 0

    def run(self, n):
        for _ in range(n):
            self.dataset.batch(self.config, self.step, 0).unbind()
            self.step += 1


class Generation:
    """The loop of sample.py: n tokens after a prompt, each the most likely one."""

    def __init__(self, config):
        self.config, self.model = config, build(config)
        self.model.init_weights(config.seed)
        self.model.to(config.device).eval()
        self.prompt = random_prompt(config)

    def run(self, n):
        ids, times = [], [time.perf_counter()]
        with autocast(self.config, torch.device(self.config.device)):
            for token in self.model.generate(self.prompt, n, temperature=0.0):
                ids.append(token.item())
                times.append(time.perf_counter())
        return {"tokens": ids, "prefill_s": times[1] - times[0], "step_s": float(np.median(np.diff(times)[1:]))}


def generation_lengths(config) -> tuple[int, int]:
    """Return the tokens of the prompt and the tokens to generate: 900 and 64, or fewer if the context is shorter."""
    n = min(64, config.block_size // 4)
    return min(900, config.block_size - n), n


def random_prompt(config):
    """Return random ids of shape (1, T), which are the same for this project and for nanoGPT."""
    ids = np.random.default_rng(config.seed).integers(0, config.vocab_size, (1, generation_lengths(config)[0]))
    return torch.from_numpy(ids).to(config.device)
