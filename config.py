"""All settings of a run with their types, defaults and units, and how settings are checked and resolved.

Nothing here imports torch, because a prediction does not need it.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli.errors import ConfigError, require
from data.format import vocab_size_of
from ops.choices import auto_loss_chunk, compiling_adamw_pays

ROOT = Path(__file__).resolve().parent
Auto = Literal["auto"]


@dataclass(frozen=True)
class Architecture:
    """The settings that decide which weights there are. A checkpoint fits a model only if all of them are equal."""

    # --- model: GPT-2 and Llama are one Transformer with different settings
    model: Literal["transformer", "mlp"] = "transformer"
    n_layer: int = 12  # L, blocks
    n_head: int = 12  # H, query heads
    n_kv_head: int | None = None  # K, key-value heads; None: n_head
    n_embd: int = 768  # C, width of the residual stream
    head_dim: int | None = None  # D, width of a head; None: n_embd / n_head
    d_ff: int | None = None  # F, width inside the MLP; None: 4 n_embd, or 8/3 n_embd rounded up to 64s if gated
    block_size: int = 1024  # T, context length, tokens
    vocab_size: int | None = None  # V, rows of the embedding; None: taken from the data's meta.json
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    pos: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
    qk_norm: bool = False  # RMSNorm over each query and key head
    bias: bool = False  # in linear layers and layer norms
    tie_weights: bool = True  # the output head is the token embedding
    mlp_context: int = 8  # model="mlp": tokens whose embeddings are concatenated

    @property
    def is_gated(self):
        return self.activation.endswith("glu")  # the MLP's first matmul makes a gate and a value


@dataclass(frozen=True)
class Config(Architecture):
    """All settings of a run."""

    # --- initialisation and dropout
    init: Literal["xavier", "gpt2"] = "xavier"
    dropout: float = 0.0  # on embeddings and residuals
    attn_dropout: float = 0.0  # on attention weights; on a CPU it saves T x T matrices for backward
    # --- data
    dataset: str = "openwebtext"  # a folder in data/, or a path with a slash
    batch_size: int = 12  # B, sequences in a micro-batch, per rank
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all ranks
    # --- optimizer: AdamW
    learning_rate: float = 6e-4  # the peak, after warm-up
    min_lr: float = 6e-5  # after the decay
    decay_lr: bool = True  # False: the learning rate is constant after warm-up
    decay_shape: Literal["cosine", "linear"] = "cosine"  # of the decay to min_lr
    warmup_iters: int = 2000  # steps
    lr_decay_iters: int = 600000  # steps until min_lr is reached
    max_iters: int = 600000  # steps, with one optimizer update each
    weight_decay: float = 1e-1  # of matrices and embeddings; vectors never decay
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float | None = 1.0  # largest global norm of the gradients; None or 0: no clipping
    # --- evaluation, logging, saving
    eval_interval: int = 2000  # steps
    eval_iters: int | None = 200  # batches of an evaluation, always the same ones; None: the whole split
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 1  # steps
    always_save_checkpoint: bool = True  # after each evaluation; False: only if the validation loss improved
    out_dir: str = "out"
    init_from: str = "scratch"  # scratch | resume (the latest checkpoint in out_dir)
    sample_tokens: int = 256  # length of the sample printed at the end of a run; 0: none
    wandb_log: bool = False  # also log to Weights & Biases, with the package wandb
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"
    # --- system
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Auto | Literal["float32", "bfloat16", "float16"] = "auto"  # of matmuls; auto: bfloat16 or float16 if native
    compile: Auto | bool = "auto"  # torch.compile of the model; auto: on CUDA only
    compile_optimizer: Auto | bool = "auto"  # AdamW as one fused kernel; auto: if that saves time over the whole run
    recompute: Literal["none", "attention", "block"] = "none"  # what backward computes again, so that it is not saved
    loss_chunk: Auto | int | None = "auto"  # tokens whose logits are computed at a time; None: all
    backend: str = "nccl"  # of torch.distributed, for runs with several processes
    seed: int = 1337

    @property
    def tokens_per_micro_step(self):
        return self.batch_size * self.block_size

    @property
    def tokens_per_step(self):
        return self.tokens_per_micro_step * self.gradient_accumulation_steps

    @property
    def data_dir(self):
        return Path(self.dataset) if "/" in self.dataset or os.sep in self.dataset else ROOT / "data" / self.dataset


LIMITS = {  # range in words -> (whether a number is in it, the settings that have to be in it)
    "from 1 to 10^9": (
        lambda x: 1 <= x <= 10**9,
        "n_layer n_head n_kv_head n_embd head_dim d_ff block_size vocab_size mlp_context batch_size "
        "gradient_accumulation_steps eval_interval eval_iters log_interval loss_chunk",
    ),
    "from 0 to 10^12": (lambda x: 0 <= x <= 10**12, "max_iters warmup_iters lr_decay_iters sample_tokens"),
    "from 0 to 2^63 - 1": (lambda x: 0 <= x < 2**63, "seed"),
    "0 or more": (lambda x: x >= 0, "learning_rate min_lr weight_decay norm_eps grad_clip"),
    "above 0": (lambda x: x > 0, "rope_theta"),
    "at least 0 and below 1": (lambda x: 0 <= x < 1, "dropout attn_dropout beta1 beta2"),
}


def check(c):
    """Raise ConfigError if a setting is out of range or two settings contradict each other."""
    for words, (is_inside, names) in LIMITS.items():
        for name in names.split():
            value = getattr(c, name)
            require(value in (None, "auto") or is_inside(value), f"{name}={value} must be {words}")
    require(c.out_dir, "out_dir is empty; name a folder")
    require(c.dataset, "dataset is empty; name a folder in data/")
    if c.model == "mlp":
        require(c.mlp_context <= c.block_size, f"mlp_context={c.mlp_context} is longer than block_size={c.block_size}")
        return
    divides = c.head_dim or c.n_embd % c.n_head == 0
    advice = f"n_embd={round_up(c.n_embd, c.n_head)} does, or set head_dim"
    require(divides, f"n_embd={c.n_embd} does not divide by n_head={c.n_head}; {advice}")
    kv_heads = c.n_kv_head or c.n_head
    if c.n_head % kv_heads:
        divisors = ", ".join(str(k) for k in range(1, min(c.n_head, 10**4) + 1) if c.n_head % k == 0)
        raise ConfigError(f"n_head={c.n_head} does not divide by n_kv_head={kv_heads}; it may be {divisors}")
    head_dim = c.head_dim or c.n_embd // c.n_head
    require(c.pos != "rope" or head_dim % 2 == 0, f"pos='rope' rotates pairs, so head_dim={head_dim} must be even")


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def resolve(config, spec):
    """Return the config with values for all settings that are None or "auto", as shape, data and hardware decide them.

    The prediction and the run both use a resolved config. `spec` is a DeviceSpec. A resolved config stays as it is.
    """
    check(config)
    c, gpu = config, spec.kind == "cuda"
    d_ff = c.d_ff or (round_up(8 * c.n_embd // 3, 64) if c.is_gated else 4 * c.n_embd)
    dtype = spec.native_dtype if c.dtype == "auto" else c.dtype
    require(
        dtype == "float32" or spec.kind == "cpu" or spec.has_matmul(dtype),
        f"dtype={dtype!r}: {spec.name} has no {dtype} matmuls; use --dtype={spec.native_dtype}, or auto",
    )
    vocab_size = c.vocab_size or vocab_size_of(c.data_dir, c.dataset)
    compiled = gpu if c.compile == "auto" else c.compile
    compile_optimizer = c.compile_optimizer
    if compile_optimizer == "auto":
        weights = c.n_layer * c.n_embd * (4 * c.n_embd + 2 * d_ff) + vocab_size * c.n_embd  # approximately
        compile_optimizer = compiled if gpu else spec.kind == "cpu" and compiling_adamw_pays(weights, c.max_iters)
    return dataclasses.replace(
        c,
        n_kv_head=c.n_kv_head or c.n_head,
        head_dim=c.head_dim or max(1, c.n_embd // c.n_head),  # an MLP may have n_embd < n_head
        d_ff=d_ff,
        vocab_size=vocab_size,
        grad_clip=c.grad_clip or None,
        device=spec.kind if c.device == "auto" else c.device,
        dtype=dtype,
        compile=compiled,
        compile_optimizer=compile_optimizer,
        loss_chunk=auto_loss_chunk(c.tokens_per_micro_step, vocab_size) if c.loss_chunk == "auto" else c.loss_chunk,
    )


def dump(config, title):
    """Return the config as the text of a config file with the same values."""
    lines = [f"{field.name} = {getattr(config, field.name)!r}" for field in dataclasses.fields(config)]
    return f"{title!r}\n\n" + "\n".join(lines) + "\n"  # repr, because a title may have a path with backslashes
