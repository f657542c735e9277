"""Train a model: python train.py CONFIG.py [--name=value ...]

What the run will take is printed before anything big is allocated; what it took is printed at the end, beside it.
"""

import sys
from dataclasses import asdict, dataclass, replace

from accounting import check_mfu, refuse_what_cannot_fit, report
from config import ROOT, SAVED_BY_COMPILING, ConfigError, command, dump, load, require, resolve
from prediction import predict
from units import duration, mib, parse_memory


@dataclass(frozen=True)
class Options:
    """Train a language model. What it will take is printed first, and held against what it took at the end."""

    overwrite: bool = False  # discard the earlier run in out_dir
    memory: str | None = None  # what may be used, such as 39.5GiB; None: what the device has free
    mfu: float | None = None  # fraction of the peak a step is predicted to reach; None: times its operations, or 0.4


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    refused = command(lambda argv: load(argv, Options) and None)()
    if refused:
        sys.exit(refused)

import importlib.util
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import torch

import checkpoint
from data.loader import Dataset, Loader
from ledger import Log, evaluation_line
from measure import (
    counted_flops,
    find_device,
    keep_freed_memory,
    profiled_peak,
    standing_bytes,
    what_slows_cpus,
    with_ceiling,
)
from model import build
from optimizer import compiled_update
from timing import with_operation_times
from tokenizer import Tokenizer
from trainer import Trainer

# what a checkpoint's weights fit to
SHAPE = {
    "model", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "d_ff", "block_size", "vocab_size", "norm",
    "norm_eps", "pos", "rope_theta", "activation", "qk_norm", "bias", "tie_weights", "mlp_context",
}  # fmt: skip


@command
def main(argv):
    # --- set-up, and what the run will take
    config, options = load(argv, Options)
    require(os.environ.get("WORLD_SIZE", "1") == "1", "this version trains in one process; start it without torchrun")
    check_mfu(options.mfu)
    require(
        not config.wandb_log or importlib.util.find_spec("wandb"),
        "wandb_log=True needs the wandb package; --wandb_log=False logs without it",
    )
    memory_bytes = parse_memory(options.memory)
    keep_freed_memory()
    device, record = find_device(config.device)
    find_data(config)
    config = resolve(config, record)
    out_dir = Path(config.out_dir)
    dataset = Dataset(config)
    saved = find_checkpoint(config, options, out_dir)
    if config.compile_optimizer and not config.eval_only:  # before the run is predicted: it may fail
        kernel = said("AdamW", "AdamW, into one pass over memory", partial(compiled_update, device))
        config = replace(config, compile_optimizer=kernel is not None)
    record = with_ceiling(record, device, config.dtype)
    prediction = predict(config, record, memory_bytes, options.mfu)
    if options.mfu is None and prediction["fits"] is not False:
        record = with_operation_times(record, device, config, prediction["time"]["total_s"])
        prediction = predict(config, record, memory_bytes)
    preflight(config, record, prediction, dataset, saved["state"]["step"] if saved else 0)

    try:
        return train(config, options, device, record, dataset, saved, prediction, out_dir)
    except torch.OutOfMemoryError as error:
        peak, available = prediction["memory"]["peak"], prediction["memory"]["available"]
        raise ConfigError(
            f"out of memory: {mib(peak)} were predicted at the peak, {mib(available)} were free at the start. Does "
            f"another program use {device}? A smaller --batch_size takes less. {error}"
        ) from None


def train(config, options, device, record, dataset, saved, prediction, out_dir):
    """Train, or evaluate only; return the exit status."""
    first_step = saved["state"]["step"] if saved else 0
    best = saved["state"]["best_val_loss"] if saved else None

    # --- model, weights, optimizer
    trainer = Trainer(config, device)
    model, optimizer, loss_scale = trainer.model, trainer.optimizer, trainer.loss_scale
    if saved:
        checkpoint.load_weights(model, saved["weights"])
        checkpoint.load_optimizer(model, optimizer, loss_scale, saved["optimizer"])
        saved.clear()  # or every step would hold the weights and moments it began with beside its own
    if config.eval_only:
        val_loss = evaluate(trainer, dataset)
        print(evaluation_line(val_loss, dataset.bits_per_byte(val_loss), config))
        return 0
    if config.compile:
        said("the model", "the model", trainer.compile)

    # --- the run's folder, log and data
    open_folder(out_dir, config, options.overwrite)
    log = Log(config, prediction, device, record, first_step)
    loader = Loader(dataset, config, device, first_step)
    stop = StopSignals()

    def save(step, is_best):
        state = {"step": step, "best_val_loss": best, "config": asdict(config), "tokenizer": dataset.meta["tokenizer"]}
        folder = checkpoint.save(out_dir, model, optimizer, loss_scale, state, is_best)
        measured["checkpoint_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        log.say(f"saved {folder}")

    # --- the loop: evaluate and save when due, step, log
    flops_per_step = flops_of_a_meta_copy(config)
    measured = {"peak_bytes": None, "flops_per_step": flops_per_step, "step_s": None, "checkpoint_bytes": None}
    standing = standing_bytes([*model.parameters(), *model.buffers(), *itertools.chain(*optimizer.state())])
    profiled = first_step + trainer.is_compiled  # a compiled model's first step is unlike the others
    step = first_step
    try:
        while True:
            over, stopping = step == config.max_iters, stop.requested  # read once: a signal may come at any time
            if over or stopping or (step % config.eval_interval == 0 and step > first_step):
                log.flush()
                improved = False
                if not stopping:
                    val_loss = evaluate(trainer, dataset)
                    log.evaluation(step, val_loss, dataset, config)
                    improved = math.isfinite(val_loss) and (best is None or val_loss < best)
                    best = val_loss if improved else best
                if step > first_step and (improved or config.always_save_checkpoint or stopping):
                    save(step, improved)
            if over or stopping:
                break
            log.begin_step()
            if step == profiled:
                found = profiled_peak(lambda: trainer.step(step, loader), standing, device)  # noqa: B023
                measured["peak_bytes"], figures, measured["timeline"] = found
            else:
                figures = trainer.step(step, loader)
            log.end_step(figures, timed=step > profiled)
            step += 1
            if step % config.log_interval == 0 or step in (profiled + 1, profiled + 2):
                log.flush()
            if step == profiled + 2:
                measured["step_s"] = log.median_step_s()
                log.ledger(measured, f"after step {step}", trainer.is_compiled)
    finally:
        stop.restore()
        loader.close()
    if stopping:
        log.close()
        saved_one = checkpoint.exists(out_dir)
        way_on = "python train.py ... --init_from=resume goes on from there" if saved_one else "nothing to save yet"
        print(f"stopped at step {step}; {way_on}")
        return 130
    measured["step_s"] = log.median_step_s()
    log.ledger(measured, "at the end", trainer.is_compiled)
    log.close()
    print_sample(trainer, dataset)
    return 0


# --- before the loop


def find_data(config):
    """Prepare the one corpus that needs no download, the standard library; any other must be there."""
    if config.dataset == "stdlib" and not (config.data_dir / "meta.json").exists():
        print("data/stdlib is not prepared yet: running python data/prepare.py stdlib", flush=True)
        done = subprocess.run([sys.executable, ROOT / "data" / "prepare.py", "stdlib"], check=False)
        require(done.returncode == 0, "data/prepare.py stdlib failed; its message stands above")
    require(
        (config.data_dir / "train.bin").exists(),
        f"{config.data_dir}: no prepared data there; python data/prepare.py {config.dataset} [--input=PATH ...] "
        "prepares it, and python train.py configs/quickstart.py needs none",
    )


def find_checkpoint(config, options, out_dir):
    """Return the checkpoint to go on from, or None; refuse to write over an earlier run unasked."""
    require(
        config.init_from in ("scratch", "resume"),
        f"init_from={config.init_from!r}: this version starts from scratch or resume, and reads no published weights",
    )
    require(
        not (options.overwrite and config.init_from == "resume"),
        "--overwrite discards the earlier run, --init_from=resume continues it: choose one",
    )
    if config.init_from == "scratch":
        require(
            options.overwrite or config.eval_only or not checkpoint.exists(out_dir),
            f"{out_dir} holds an earlier run: --init_from=resume continues it, --overwrite discards it",
        )
        return None
    saved = checkpoint.load(out_dir)
    step = saved["state"]["step"]
    require(
        step < config.max_iters or config.eval_only,
        f"{out_dir}: the run is at step {step} of max_iters={config.max_iters}; to go on, raise --max_iters",
    )
    changed = {name: old for name, old in saved["state"]["config"].items() if asdict(config).get(name) != old}
    shape = ", ".join(f"{name}={old!r}" for name, old in changed.items() if name in SHAPE)
    require(not shape, f"{out_dir}: the checkpoint was trained with {shape}; to resume, set the same")
    for name, old in changed.items():
        if name not in ("init_from", "out_dir", "device", "eval_only"):
            print(f"changed since the checkpoint: {name} was {old!r}, is {getattr(config, name)!r} from here on")
    return saved


def preflight(config, record, prediction, dataset, first_step):
    """Print what the run will take; raise where it cannot fit."""
    c = config
    for line in report(c, record, prediction):
        print(line)
    epoch = dataset.epoch_windows() * c.block_size
    epochs = c.tokens_per_step * c.max_iters / epoch
    cache = mib(sum(tokens.nbytes for tokens in dataset.tokens.values()))
    print(f"data        {dataset.folder}: {epoch:,} tokens an epoch, {epochs:.2f} epochs in all")
    print(f"            up to {cache} of page cache, which the system takes back when it needs to")
    first_save = min(c.max_iters, (first_step // c.eval_interval + 1) * c.eval_interval)
    when = "at evaluations and at the end" if c.always_save_checkpoint else "where validation improved"
    if not c.eval_only:
        print(f"checkpoint  in {c.out_dir}: first after step {first_save:,}, then {when}, and at Ctrl-C")
        print(f"compile     {what_is_compiled(c, prediction['model']['params'])}")
    notes = list(dataset.notes)
    if c.warmup_iters >= c.max_iters and not c.eval_only:
        notes.append(f"warmup_iters={c.warmup_iters} is no shorter than the run: lr never reaches its peak")
    if c.dtype == "float16":
        notes.append("float16: the loss is scaled, and a step whose gradients overflow is skipped")
    notes += what_slows_cpus() if record.kind == "cpu" else []
    for note in notes:
        print(f"note        {note}")
    sys.stdout.flush()
    refuse_what_cannot_fit(c, record, prediction)


def what_is_compiled(c, n_parameters):
    """Return what torch.compile is used for in this run, and why. The figures are records/bench/NOTES.md's."""
    if c.compile:
        model = "yes"
    else:
        model = "no (on a CPU it gained 8% at most, and lost with large models)" if c.device == "cpu" else "no"
    if c.device != "cpu":
        return f"the model: {model}; AdamW: {'yes' if c.compile_optimizer else 'no'}"
    a_step = n_parameters * SAVED_BY_COMPILING
    if c.compile_optimizer:
        return f"the model: {model}; AdamW: yes ({duration(a_step)} less a step)"
    return f"the model: {model}; AdamW: no (it would save {duration(a_step * c.max_iters)}, and take up to 10 s)"


def said(name, what, make):
    """Return what make() compiled, with a line that says how long it took; None where it failed, and why."""
    start = time.perf_counter()
    found, trouble = make()
    if found is None:
        print(f"warning     torch.compile failed, so {name} is eager: {trouble}", flush=True)
    else:
        print(f"compiled    {what}, in {time.perf_counter() - start:.1f} s", flush=True)
    return found


def flops_of_a_meta_copy(config):
    with torch.device("meta"):
        return counted_flops(build(config), config)


def open_folder(out_dir, config, overwrite):
    """Make the run's folder, with its resolved settings in it; to overwrite is to discard an earlier run's files first.

    Only the names that a run writes are removed: whatever else a user keeps there stays.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(out_dir.iterdir()) if overwrite else ():
            if path.is_dir() and re.fullmatch(r"step_\d{8}|\.step_\d{8}\.tmp", path.name):
                shutil.rmtree(path)
            elif path.name in ("latest", "best", "metrics.jsonl", "ledger.json"):
                path.unlink()
        text = dump(config, f"Resolved settings of the run in {out_dir}.")
        (out_dir / "config.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out_dir}: cannot be written ({error.strerror}); --out_dir names another folder") from None


class StopSignals:
    """Ctrl-C and SIGTERM ask for a stop after the current step; a second one stops at once."""

    def __init__(self):
        self.requested = False
        self.earlier = {s: signal.signal(s, self.request) for s in (signal.SIGINT, signal.SIGTERM)}

    def request(self, number, frame):
        self.requested = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def restore(self):
        for number, handler in self.earlier.items():
            signal.signal(number, handler)


# --- during and after it


@torch.no_grad()
def evaluate(trainer, dataset):
    """Return the mean validation loss, nats per token; the same windows at every call."""
    model = trainer.model
    model.eval()
    total, n = torch.zeros((), device=trainer.device), 0
    for batch in dataset.validation(trainer.config):
        x, y = batch.to(trainer.device)
        with trainer.autocast:
            total += model(x, y) * len(x)
        n += len(x)
    model.train()
    return total.item() / n


def print_sample(trainer, dataset):
    """Print what the model writes from an end of text, or from the first token of validation where there is none."""
    model, config, device = trainer.model, trainer.config, trainer.device
    if not config.sample_tokens:
        return
    try:
        tokenizer = Tokenizer(dataset.meta["tokenizer"])
    except ConfigError as error:  # nanoGPT's data has nothing but a name, which may need the network: no reason to fail
        print(f"no sample: {error}")
        return
    start = tokenizer.eot if tokenizer.eot is not None else int(dataset.tokens["val"][0])
    model.eval()
    generator = torch.Generator(device).manual_seed(config.seed)
    idx = torch.tensor([[start]], device=device)
    with trainer.autocast:
        ids = [token.item() for token in model.generate(idx, config.sample_tokens, 0.8, top_k=200, generator=generator)]
    print(f"--- a sample ({config.sample_tokens} tokens, temperature 0.8; python sample.py {config.out_dir} for more)")
    print(tokenizer.decode([i for i in ids if i < tokenizer.vocab_size]))


if __name__ == "__main__":
    sys.exit(main())
