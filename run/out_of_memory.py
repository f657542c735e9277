"""What is said where memory ran out in spite of the prediction."""

import torch

from cli.errors import ConfigError
from cli.units import mib

# What allocators say that raise an error of no class of their own: torch's on a CPU, and on an Apple GPU.
WORDS = ("can't allocate memory", "out of memory")


def refuse_if_out_of_memory(error: Exception, memory: dict, device: torch.device):
    """Raise ConfigError, with the predicted memory, where an error says that memory ran out; pass over any other."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if not known and not any(words in str(error) for words in WORDS):
        return
    free = "" if memory["available"] is None else f", {mib(memory['available'])} were available at the start"
    raise ConfigError(
        f"out of memory: {mib(memory['peak'])} were predicted at the peak{free}. Does another program use {device}? "
        f"A smaller --batch_size takes less. {error}"
    ) from None
