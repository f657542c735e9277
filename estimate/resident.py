"""The resident set size of a training process on a CPU: its tensors, and what torch, Python and the allocator add."""

FIRST_STEP_BYTES = 48 * 2**20  # torch's code that the first step loads, and scratch memory of its threads
COUNTER_BYTES = 77 * 2**20  # modules that torch imports to count FLOPs on the meta device, mainly sympy
GAPS = 0.4  # unused gaps in the allocator's heap, as a fraction of what a step allocates; 0.3 to 0.6 were measured


def resident_bytes(before, memory, has_counter):
    """Return the resident set size that a run reaches. `before` is the one of the process before the model is built.

    `memory` is that of the prediction. Parameters and moments are never freed, so they leave no gaps. has_counter says
    whether the modules for counting FLOPs are already in memory; the compiler imports them too.
    """
    allocated_in_step = memory["peak"] - memory["params"] - memory["optimizer"]
    before += 0 if has_counter else COUNTER_BYTES
    return round(before + memory["peak"] + GAPS * allocated_in_step) + FIRST_STEP_BYTES
