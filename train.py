"""Train a model: python train.py CONFIG.py [--name=value ...]

Before anything big is allocated, the run's predicted memory, FLOPs and time are printed; at the end, predicted against
measured.
"""

import sys
from dataclasses import asdict, dataclass

from cli.errors import command, exit_on_mistake, require
from cli.flags import load
from cli.units import check_mfu, parse_memory
from config import Config, resolve


@dataclass(frozen=True)
class Options:
    """Train a language model. The run's cost is predicted first, and compared with what was measured at the end."""

    overwrite: bool = False  # discard the earlier run in out_dir
    memory: str | None = None  # what may be used, such as 39.5GiB; None: what the device has free
    mfu: float | None = None  # fraction of the peak a step is predicted to reach; None: times its operations, or 0.4


def read(argv):
    """Return (config, options, bytes of memory that may be used) of a command line."""
    config, options = load(argv, Config, Options, "python train.py CONFIG.py ...")
    check_mfu(options.mfu)
    return config, options, parse_memory(options.memory)


if __name__ == "__main__":  # before torch is imported, so that --help and a typo are answered at once
    exit_on_mistake(read)

import importlib.util
import math
import os

import torch

from data.loader import Dataset, Loader
from measure.machine import find_device
from run import checkpoint
from run.folder import find_checkpoint, find_data, open_folder
from run.log import Log, evaluation_line
from run.out_of_memory import refuse_if_out_of_memory
from run.preflight import compile_and_report, predict_run, print_preflight
from run.signals import StopSignals
from run.text import print_sample
from trainer import Trainer


@command
def main(argv):
    # --- set-up
    config, options, memory_bytes = read(argv)
    require(os.environ.get("WORLD_SIZE", "1") == "1", "this version trains in one process; start it without torchrun")
    has_wandb = not config.wandb_log or importlib.util.find_spec("wandb")
    require(has_wandb, "wandb_log=True needs the wandb package; --wandb_log=False logs without it")
    device, spec = find_device(config.device)
    find_data(config)
    config = resolve(config, spec)
    dataset = Dataset(config)
    saved = find_checkpoint(config, options.overwrite)
    first_step, best = (saved["state"]["step"], saved["state"]["best_val_loss"]) if saved else (0, None)

    # --- what the run will take
    config, spec, prediction = predict_run(config, device, spec, memory_bytes, options.mfu)
    print_preflight(config, spec, prediction, dataset, first_step)

    # --- the run
    try:
        trainer = Trainer(config, device)
        if saved:
            checkpoint.restore(trainer, saved)
        if config.eval_only:
            val_loss = evaluate(trainer, dataset)
            print(evaluation_line(val_loss, dataset.bits_per_byte(val_loss), config))
            return 0
        if config.compile:
            compile_and_report("the model", "the model", trainer.compile)
        open_folder(config, options.overwrite)
        return train(trainer, dataset, spec, prediction, first_step, best)
    except (RuntimeError, MemoryError) as error:
        refuse_if_out_of_memory(error, prediction["memory"], device)
        raise


def train(trainer, dataset, spec, prediction, first_step, best):
    """Step until max_iters or a signal; evaluate, save and log when due. Return the exit status."""
    config, device, step = trainer.config, trainer.device, first_step
    stop = StopSignals()
    log = Log(config, prediction, device, spec, first_step)
    profiled = first_step + trainer.is_compiled  # not a compiled model's first, which is unlike the others
    loader = Loader(dataset, config, device, first_step)
    try:
        while True:
            over, stopping = step == config.max_iters, stop.requested  # read once: a signal may come at any time
            if over or stopping or (step % config.eval_interval == 0 and step > first_step):
                log.flush()
                improved = False
                if not stopping:
                    val_loss = evaluate(trainer, dataset)
                    log.evaluation(step, val_loss, dataset.bits_per_byte(val_loss))
                    improved = math.isfinite(val_loss) and (best is None or val_loss < best)
                    best = val_loss if improved else best
                if step > first_step and (improved or config.always_save_checkpoint or stopping):
                    state = {"step": step, "best_val_loss": best, "config": asdict(config)}
                    state["tokenizer"] = dataset.tokenizer
                    log.saved(checkpoint.save(config.out_dir, trainer, state, improved))
            if over or stopping:
                break
            log.begin_step()
            figures = log.profile(trainer, step, loader) if step == profiled else trainer.step(step, loader)
            log.end_step(figures, timed=step > profiled)
            step += 1
            if step % config.log_interval == 0 or step in (profiled + 1, profiled + 2):
                log.flush()
            if step == profiled + 2:
                log.ledger(f"after step {step}", trainer.is_compiled)
    finally:
        stop.restore()
        loader.close()
    if stopping:
        log.close()
        saved = checkpoint.exists(config.out_dir)
        way_on = "python train.py ... --init_from=resume continues from there" if saved else "nothing was saved yet"
        print(f"stopped at step {step}; {way_on}")
        return 130
    log.ledger("at the end", trainer.is_compiled)
    log.close()
    print_sample(trainer, dataset)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
