"""Every setting of a run, declared once; how settings are read, checked, resolved and written.

A config file is Python syntax that is parsed and never run: `name = literal` lines, with arithmetic on
numbers. Settings come from the defaults, then from files left to right, then from `--name=value` flags.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import operator
import os
import re
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if sys.version_info < (3, 11):  # noqa: UP036 (a clone checks nothing else)
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

ROOT = Path(__file__).resolve().parent
Auto = Literal["auto"]
SAVED_BY_COMPILING = 1e-9  # s a parameter and step by which AdamW is faster in one pass: measured on two cores


@dataclass(frozen=True)
class Config:
    # --- model: GPT-2 and Llama are two settings of one Transformer
    model: Literal["transformer", "mlp"] = "transformer"
    n_layer: int = 12  # L, blocks
    n_head: int = 12  # H, query heads
    n_kv_head: int | None = None  # K, key-value heads; None: n_head
    n_embd: int = 768  # C, width of the residual stream
    head_dim: int | None = None  # D, width of a head; None: n_embd / n_head
    d_ff: int | None = None  # F, width inside the MLP; None: 4 n_embd (swiglu: 8/3, rounded up to 64s)
    block_size: int = 1024  # T, context length, tokens
    vocab_size: int | None = None  # V, rows of the embedding; None: what the data's meta.json says
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    pos: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
    qk_norm: bool = False  # RMSNorm over each query and key head
    bias: bool = False  # in linear layers and layer norms
    tie_weights: bool = True  # the output head is the token embedding
    dropout: float = 0.0  # on embeddings and residuals
    attn_dropout: float = 0.0  # on attention weights; on a CPU it keeps T x T matrices
    init: Literal["xavier", "gpt2"] = "xavier"
    mlp_context: int = 8  # model="mlp": tokens whose embeddings are concatenated
    # --- data
    dataset: str = "openwebtext"  # a folder below data/, or a path with a slash in it
    batch_size: int = 12  # B, sequences in a micro-batch, per rank
    gradient_accumulation_steps: int = 5 * 8  # micro-batches per step, over all ranks
    # --- optimizer: AdamW
    learning_rate: float = 6e-4  # peak
    min_lr: float = 6e-5  # floor of the decay
    decay_lr: bool = True  # False: constant after warm-up
    decay_shape: Literal["cosine", "linear"] = "cosine"  # how it falls to min_lr
    warmup_iters: int = 2000  # steps
    lr_decay_iters: int = 600000  # steps until min_lr
    max_iters: int = 600000  # steps: one optimizer update each
    weight_decay: float = 1e-1  # on matrices and embeddings; vectors never decay
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float | None = 1.0  # largest global gradient norm; None or 0: off
    # --- evaluation, logging, saving
    eval_interval: int = 2000  # steps
    eval_iters: int | None = 200  # batches of validation, a fixed sample; None: the whole split
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 1  # steps
    always_save_checkpoint: bool = True  # after each evaluation; False: only when validation improved
    out_dir: str = "out"
    init_from: str = "scratch"  # scratch | resume (the latest checkpoint in out_dir)
    sample_tokens: int = 256  # length of the sample printed at the end of a run; 0: none
    wandb_log: bool = False  # also log to Weights & Biases (needs the wandb package)
    wandb_project: str = "owt"
    wandb_run_name: str = "gpt2"
    # --- system
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | mps
    dtype: Auto | Literal["float32", "bfloat16", "float16"] = "auto"  # of matmuls; auto: bfloat16 where native
    compile: Auto | bool = "auto"  # torch.compile of the model; auto: on CUDA only
    compile_optimizer: Auto | bool = "auto"  # AdamW in one pass over memory; auto: where that saves more than it costs
    recompute: Literal["none", "attention", "block"] = "none"  # what backward computes again instead of keeping it
    loss_chunk: Auto | int | None = "auto"  # tokens whose logits exist at a time; None: all; auto: fewer if many
    backend: str = "nccl"  # of torch.distributed, for runs of several processes
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


class ConfigError(Exception):
    """A user's mistake: one line that says what, where and the way out."""


def command(main):
    """Wrap a script's main(argv): a user's mistake is one line on stderr and exit status 2."""

    @functools.wraps(main)
    def wrapped(argv=None):
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except ConfigError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of a pipe left, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return wrapped


# --- reading


def load(argv, options=None, positional="CONFIG.py ..."):
    """Return (Config, options) from a command line of config files and flags.

    `options` is the command's own dataclass of flags beside the settings; `positional` is what usage shows first.
    """
    files, flags = parse(argv, (Config, options) if options else (Config,), positional)
    settings = {}
    for file in files:
        settings |= read_file(file)
    settings |= {name: value for name, value in flags.items() if name in Config.__dataclass_fields__}
    own = {name: value for name, value in flags.items() if name not in Config.__dataclass_fields__}
    return Config(**settings), options(**own) if options else None


def parse(argv, classes, positional):
    """Return (positional words, {name: value}) of a command line whose flags the dataclasses declare.

    Both --name=value and --name value are read. A command's own switch (a bool) needs no value, nor does an option
    whose field's metadata says what it means "bare". When the line asks for --help, print it and exit.
    """
    known = {field.name: (kind, field.metadata.get("bare")) for cls in classes for field, kind in fields(cls)}
    words, flags, rest = [], {}, list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            print(help_text(classes, positional))
            raise SystemExit(0)
        if not word.startswith("--"):
            plain = not word.startswith("-") and ("=" not in word or os.path.exists(word))
            require(plain, f"argument {word!r}: write --{word.lstrip('-')}")
            words.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        require(name in known, f"unknown setting --{name}{nearest(name, known)}")
        kind, bare = known[name]
        if kind is bool and name not in Config.__dataclass_fields__:
            bare = True
        if not equals and (bare is True or (bare is not None and not (rest and is_value(rest[0])))):
            flags[name] = bare
            continue
        if not equals:
            require(rest and not rest[0].startswith("--"), f"--{name} needs a value: --{name}=VALUE")
            text = rest.pop(0)
        flags[name] = convert(name, literal_or_text(text, kind), kind, f"--{name}={text}")
    return words, flags


def is_value(word):
    """Return whether a word behind a flag is the flag's value, and not the next flag or a config file."""
    return not word.startswith("--") and not word.endswith(".py")


def fields(cls):
    """Yield (field, type) for each setting of a dataclass."""
    kinds = typing.get_type_hints(cls)
    return [(field, kinds[field.name]) for field in dataclasses.fields(cls)]


def read_file(path):
    """Return the settings of a config file as a dict, without running it."""
    known = {field.name: kind for field, kind in fields(Config)}
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file; configs/ holds examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested without end
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        raise ConfigError(f"{where}: not Python syntax; a config is `name = value` lines") from None
    settings = {}
    for line in tree.body:
        where = f"{path}:{line.lineno}"
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
            continue  # the docstring
        if not (isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)):
            raise ConfigError(f"{where}: only `name = literal` lines are allowed; a config is read, never run")
        name = line.targets[0].id
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}{nearest(name, known)}")
        try:
            value = evaluate(line.value)
        except (ValueError, ArithmeticError, RecursionError):
            raise ConfigError(f"{where}: the value of {name} is not a literal; a config is read, never run") from None
        settings[name] = convert(name, value, known[name], where)
    return settings


ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
              ast.FloorDiv: operator.floordiv, ast.USub: operator.neg, ast.UAdd: operator.pos}  # fmt: skip


def evaluate(node):
    """Evaluate a literal, with + - * / // and ** on numbers (bounded, so that no line can hang or overflow)."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (bool, int, float, str))):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in ARITHMETIC:
        value = ARITHMETIC[type(node.op)](number(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        value = ARITHMETIC[type(node.op)](number(node.left), number(node.right))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = number(node.left), number(node.right)
        if abs(exponent) > 64:
            raise ValueError("too large a power")
        value = base**exponent
    else:
        raise ValueError("not a literal")
    if isinstance(value, int):
        float(value)  # OverflowError above 1e308
    return value


def number(node):
    value = evaluate(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("arithmetic is for numbers")
    return value


def literal_or_text(text, kind):
    """Read a flag's text: a literal where the setting can take one, the text itself otherwise."""
    if kind is str or str in typing.get_args(kind):
        return None if kind is not str and text == "None" else text
    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return text


def convert(name, value, kind, where):
    """Return value as `kind`, or say what was expected. Only int becomes float; a whole float (1e5) becomes int."""
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for choice in choices:
        if typing.get_origin(choice) is Literal and value in typing.get_args(choice):
            return value
        if type(value) is choice and not (choice is float and not math.isfinite(value)):
            return value
    if float in choices and type(value) is int:
        return float(value)
    if int in choices and type(value) is float and value.is_integer():
        return int(value)
    raise ConfigError(f"{where}: {name} expects {describe(choices)}, got {value!r}")


def describe(choices):
    words = []
    for choice in choices:
        if typing.get_origin(choice) is Literal:
            words += [repr(value) for value in typing.get_args(choice)]
        else:
            words += {
                bool: ["True", "False"],
                int: ["an integer"],
                float: ["a number"],
                str: ["a text"],
                type(None): ["None"],
            }[choice]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def nearest(name, known):
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists all settings"


def help_text(classes, positional):
    """Return the usage, the command's own options and all settings: their declarations, as they stand in the source."""
    about = inspect.cleandoc(classes[-1].__doc__) if classes[-1] is not Config else ""
    text = f"usage: python {os.path.basename(sys.argv[0])} {positional} [--name=value ...]\n\n{about}"
    for cls in reversed(classes):
        title = "Settings, which a config file may hold too:" if cls is Config else "Options of this command:"
        source = re.sub(r"= field\(default=(\w+), .*\)  #", r"= \1  #", inspect.getsource(cls))
        lines = [line.strip() for line in source.splitlines()]
        shown = [line if line[0] == "#" else "--" + line for line in lines if re.match(r"\w+: .* = |# ---", line)]
        text += f"\n\n{title}\n" + "\n".join("  " + line for line in shown)
    return text


# --- checking and resolving


def check(config):
    """Raise ConfigError where settings contradict each other: the one place, for prediction and run alike."""
    c = config
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "mlp_context")
    optional = ("n_kv_head", "head_dim", "d_ff", "vocab_size", "eval_iters")
    for name in (*sizes, *optional, "eval_interval", "log_interval"):
        value, none = getattr(c, name), ", or None" if name in optional else ""
        require(value is None or value >= 1, f"{name}={value} must be at least 1{none}")
        require((value or 0) <= 10**9, f"{name}={value or 0:g} is beyond any machine: 1,000,000,000 at most")
    steps = ("max_iters", "warmup_iters", "lr_decay_iters")
    for name in (*steps, "learning_rate", "min_lr", "weight_decay", "seed", "sample_tokens", "norm_eps"):
        require(getattr(c, name) >= 0, f"{name}={getattr(c, name)} must not be negative")
    for name in steps:
        require(getattr(c, name) <= 10**12, f"{name}={getattr(c, name):g} is beyond any run: 10^12 at most")
    for name in ("dropout", "attn_dropout", "beta1", "beta2"):
        require(0 <= getattr(c, name) < 1, f"{name}={getattr(c, name)} must lie in [0, 1)")
    chunk = c.loss_chunk
    require(chunk in ("auto", None) or chunk >= 1, f"loss_chunk={chunk} must be at least 1, or None")
    require(
        c.grad_clip is None or c.grad_clip >= 0,
        f"grad_clip={c.grad_clip} must not be negative; None turns clipping off",
    )
    require(c.seed < 2**63, f"seed={c.seed} must be below 2**63")
    require(c.rope_theta > 0, f"rope_theta={c.rope_theta} must be positive")
    require(c.out_dir, "out_dir is empty; name a folder")
    require(c.dataset, "dataset is empty; name a folder below data/")
    if c.model == "mlp":
        require(c.mlp_context <= c.block_size, f"mlp_context={c.mlp_context} is longer than block_size={c.block_size}")
        return
    require(
        c.head_dim or c.n_embd % c.n_head == 0,
        f"n_embd={c.n_embd} does not divide by n_head={c.n_head}; "
        f"n_embd={round_up(c.n_embd, c.n_head)} does, or set head_dim",
    )
    kv = c.n_kv_head or c.n_head
    if c.n_head % kv:
        divisors = ", ".join(str(k) for k in range(1, min(c.n_head, 10**4) + 1) if c.n_head % k == 0)
        raise ConfigError(f"n_head={c.n_head} does not divide by n_kv_head={kv}; it may be {divisors}")
    head_dim = c.head_dim or c.n_embd // c.n_head
    require(c.pos != "rope" or head_dim % 2 == 0, f"pos='rope' rotates pairs: head_dim={head_dim} must be even")


def require(condition, message):
    if not condition:
        raise ConfigError(message)


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def resolve(config, device):
    """Return the config with everything that depends on shape, data or machine filled in: once, for prediction and run.

    `device` is a plain record (hardware.Device). A resolved config resolves to itself.
    """
    check(config)
    ff = 4 * config.n_embd if config.activation != "swiglu" else round_up(8 * config.n_embd // 3, 64)
    native = "bfloat16" if device.has_matmul("bfloat16") else "float16" if device.kind == "cuda" else "float32"
    dtype = native if config.dtype == "auto" else config.dtype
    require(
        dtype == "float32" or device.kind == "cpu" or device.has_matmul(dtype),
        f"dtype={dtype!r}: {device.name} has no {dtype} matmuls; --dtype={native}, or auto, fits it",
    )
    vocab_size = config.vocab_size or data_vocab_size(config)
    compiled, optimizer_compiled = config.compile, config.compile_optimizer
    if compiled == "auto":
        compiled = device.kind == "cuda"
    if optimizer_compiled == "auto":
        parameters = config.n_layer * config.n_embd * (4 * config.n_embd + 2 * ff) + vocab_size * config.n_embd
        saved_s = parameters * config.max_iters * SAVED_BY_COMPILING  # against 3 to 10 s of compiling
        optimizer_compiled = compiled if device.kind == "cuda" else device.kind == "cpu" and saved_s > 20
    chunk = config.loss_chunk
    if chunk == "auto":
        chunk = chunk_of(config.tokens_per_micro_step, vocab_size)
    return dataclasses.replace(
        config,
        n_kv_head=config.n_kv_head or config.n_head,
        head_dim=config.head_dim or max(1, config.n_embd // config.n_head),  # an MLP may be narrower than n_head
        d_ff=config.d_ff or ff,
        vocab_size=vocab_size,
        grad_clip=config.grad_clip or None,
        device=device.kind if config.device == "auto" else config.device,
        dtype=dtype,
        compile=compiled,
        compile_optimizer=optimizer_compiled,
        loss_chunk=chunk,
    )


def chunk_of(tokens, vocab_size):
    """Return how many tokens' logits exist at a time: all (None) where they are few, else a power of two."""
    return None if tokens * vocab_size <= 2**23 else min(tokens, 2 ** max(0, (2**25 // vocab_size).bit_length() - 1))


def data_vocab_size(config):
    """Return the vocabulary of the prepared data; nanoGPT's folders have no meta.json: GPT-2's, padded as there."""
    meta = config.data_dir / "meta.json"
    if meta.exists():
        try:
            return int(json.loads(meta.read_text(encoding="utf-8"))["vocab_size"])
        except (ValueError, KeyError, TypeError, OSError):
            raise ConfigError(f"{meta}: not a readable meta.json; prepare the data again") from None
    if (config.data_dir / "train.bin").exists():
        return 50304
    raise ConfigError(
        f"{config.data_dir}: no prepared data there, so vocab_size is unknown; "
        f"run python data/prepare.py {config.dataset}, or set --vocab_size"
    )


# --- writing


def dump(config, title):
    """Return the config as the text of a config file that loads to the same values."""
    lines = [f"{field.name} = {getattr(config, field.name)!r}" for field in dataclasses.fields(config)]
    return f"{title!r}\n\n" + "\n".join(lines) + "\n"  # repr: a title may hold a path with backslashes
