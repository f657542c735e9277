"""A whole training step, and one forward pass of generation, each as a list of operations."""

import dataclasses
from dataclasses import dataclass, field

from estimate.layers import block, embedding, loss
from estimate.tape import Buffer, Op, Tape


@dataclass
class Step:
    """The operations of a step, in the order of execution."""

    config: object
    spec: object
    ops: list[Op]
    params: dict[str, Buffer]
    persistent: list[Buffer] = field(default_factory=list)  # alive before the step and after it


def training_step(config, spec, whole=False):
    """Return a training step of a resolved config: its micro-steps, then the update.

    It is a step in the middle of a run, which finds the optimizer state in memory. All micro-steps after the first are
    alike, so one of them is recorded for all. The same holds for the inner blocks of a deep model; whole=True records
    each block.
    """
    tape = Tape(config, spec)
    shape = (config.batch_size, config.block_size)
    idx, targets = (Buffer(name, shape, "int64", "batch") for name in ("inputs", "targets"))
    n_later = config.gradient_accumulation_steps - 1
    for n_micro_steps in (1, n_later) if n_later else (1,):
        tape.micro_steps = n_micro_steps
        x = embedding(tape, idx)
        for layer, repeat in recorded_blocks(config.n_layer, whole):
            x = block(tape, x, layer, repeat)
        tape.group = "norm"
        total = loss(tape, tape.norm("norm", x), targets)
        tape.record(
            "leave autocast", tape.weight_copies.values(), ()
        )  # autocast keeps its copies of weights until here
        tape.weight_copies = {}
        tape.backward(total)
    tape.micro_steps = 1
    states = optimizer(tape)
    persistent = [*tape.params.values(), *states, idx, targets, *tape.rope_tables]
    return Step(config, spec, tape.ops, tape.params, persistent)


def recorded_blocks(n_layer, whole):
    """Return (index of a block, how many blocks it stands for) for each block that is recorded.

    All blocks but the first and the last are alike. From one of them to the next, the bytes alive at the same operation
    change by the same amount, so the most bytes are alive in the first or in the last of them. These two are recorded
    on their own, and the peak is exact.
    """
    if whole or n_layer <= 5:
        return [(layer, 1) for layer in range(n_layer)]
    return [(0, 1), (1, 1), (2, n_layer - 4), (n_layer - 2, 1), (n_layer - 1, 1)]


def optimizer(tape):
    """Record the norm of the gradients, for clipping, then AdamW, which frees the gradients. Return its moments.

    Compiled, AdamW updates a parameter in one pass. Otherwise it needs one temporary of the parameter's size.
    """
    tape.group = tape.phase = "optimizer"
    for p, grad in tape.param_gradients.items():
        tape.repeat = p.repeat
        norm = Buffer("norm", (), "float32")
        name = f"norm of gradient of {p.name}"
        tape.record(name, (grad,), (norm,), kind="gradient norm", inputs=(p,), output=norm)
    one_pass = tape.config.compile_optimizer
    kind, states = "one-pass update" if one_pass else "update", []
    for p, grad in tape.param_gradients.items():
        tape.repeat = p.repeat
        moments = [
            Buffer(f"{moment} of {p.name}", p.shape, "float32", "state", repeat=p.repeat)
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        scratch = () if one_pass else (Buffer(f"update of {p.name}", p.shape, "float32"),)
        reads, writes = (p, grad, *moments), (p, *moments, *scratch)
        tape.record(f"update {p.name}", reads, writes, kind=kind, inputs=(p,), output=p)
        states += moments
    tape.repeat = 1
    tape.record("free gradients", tape.param_gradients.values(), ())
    return states


def generation_step(config, spec, batch_size, new, past):
    """Return one forward pass of generation: each sequence has `past` cached tokens and gets `new` more.

    Only the last position has logits. past = 0 is prefill, and new = 1 is decoding. There is no dropout, and the
    weights are already in the dtype of matmuls. All blocks are alike, so one is recorded for all.
    """
    config = dataclasses.replace(config, batch_size=batch_size, block_size=new, dropout=0.0, attn_dropout=0.0)
    tape = Tape(config, spec, past)
    idx = Buffer("inputs", (batch_size, new), "int64", "batch")
    x = embedding(tape, idx)
    x = block(tape, x, 0, config.n_layer)
    tape.group = "norm"
    x = tape.norm("norm", x)
    tape.group = "head"
    last = Buffer("last position", (batch_size, config.n_embd), "float32", base=x)
    weight = tape.param("wte" if config.tie_weights else "head", config.vocab_size, config.n_embd)
    tape.linear("logits", last, config.vocab_size, weight=weight)
    persistent = [*tape.params.values(), *tape.weight_copies.values(), *tape.caches, *tape.rope_tables, idx]
    return Step(config, spec, tape.ops, tape.params, persistent)
