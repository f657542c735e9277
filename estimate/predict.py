"""The whole prediction of a run, from one list of operations: counts, FLOPs, memory and time."""

from estimate.flops import parameters, step_flops
from estimate.memory import step_memory
from estimate.step import training_step
from estimate.step_time import step_time


def predict(config, spec, memory_bytes=None, mfu=None):
    """Return all figures of a run as a nested dict. Counts, FLOPs and bytes are integers; times are seconds or None.

    fits: whether the tensors of a step fit into the memory; None if the memory is not known
    tight: whether they may not fit in the end, because of the other memory that a GPU needs, which is only estimated
    """
    s = training_step(config, spec)
    model, flops, memory = parameters(s), step_flops(s), step_memory(s)
    available = memory["available"] = memory_bytes or spec.memory_bytes
    fits = memory["peak"] <= available if available else None
    tight = bool(fits) and memory["peak"] + most_other_memory(memory, spec) > available
    return {
        "model": model,
        "flops": flops,
        "memory": memory,
        "time": step_time(s, flops, mfu),
        "fits": fits,
        "tight": tight,
    }


def most_other_memory(memory, spec):
    """Return the most bytes of the available memory that a GPU needs for other things than tensors; 0 on a CPU.

    For a card of the table, the available memory already excludes the least that a CUDA context takes. For a card in
    this machine, it is the free memory, which excludes the whole context.
    """
    if not memory["card"]:
        return 0
    least, most = memory["card"]["CUDA context"]
    context = most - least if spec.leaves_context and memory["available"] == spec.memory_bytes else 0
    return context + sum(most for name, (_, most) in memory["card"].items() if name != "CUDA context")
