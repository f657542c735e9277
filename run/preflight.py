"""What is printed before a run: the prediction, the data, what is compiled, and a refusal where it cannot fit."""

import sys
import time
from dataclasses import replace
from functools import partial

from cli.units import duration, mib
from estimate.fit import refuse_what_cannot_fit
from estimate.predict import predict
from estimate.report import report
from estimate.resident import resident_bytes
from measure.machine import cpu_warnings, raised_peak, with_measured_peak
from measure.memory import process_memory, release_freed_memory, tune_allocator
from measure.operations import with_operation_times
from ops.choices import SAVED_BY_COMPILING
from optimizer import compiled_update


def predict_run(config, device, spec, memory_bytes, mfu):
    """Return (config, spec, prediction) of a run on this machine.

    A compiled AdamW is tried here, since compilers may fail, and the config says what came of it. The spec gets what is
    measured on the machine: its peak, and times of single operations where the run is long enough to be worth it.
    """
    if config.compile_optimizer and not config.eval_only:
        kernel = compile_and_report("AdamW", "AdamW, as one fused kernel", partial(compiled_update, device))
        config = replace(config, compile_optimizer=kernel is not None)
    release_freed_memory()  # the compiler's
    tune_allocator()
    spec = with_measured_peak(spec, device, config.dtype)
    prediction = predict(config, spec, memory_bytes, mfu)
    if mfu is None and prediction["fits"] is not False:
        spec = with_operation_times(spec, device, config, prediction["time"]["total_s"])
        prediction = predict(config, spec, memory_bytes)
        time = prediction["time"]
        if time["mfu"] > 1:  # the peak was measured too low, beside another program
            spec = raised_peak(spec, config.dtype, time["mfu"] * time["peak_flops"], "operations timed alone")
            prediction = predict(config, spec, memory_bytes)
    if device.type == "cpu":
        release_freed_memory()
        prediction["memory"]["resident"] = resident_bytes(
            process_memory(device), prediction["memory"], has_counter="sympy" in sys.modules
        )
    return config, spec, prediction


def print_preflight(config, spec, prediction, dataset, first_step):
    """Print what the run will take; raise ConfigError where it cannot fit."""
    c = config
    for line in report(c, spec, prediction):
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
        print(f"compile     {compile_summary(c, prediction['model']['params'])}")
    for note in notes(c, spec, dataset):
        print(f"note        {note}")
    sys.stdout.flush()
    refuse_what_cannot_fit(c, spec, prediction)


def notes(c, spec, dataset):
    """Yield what the user should know before the run."""
    if dataset.note:
        yield dataset.note
    if c.warmup_iters >= c.max_iters and not c.eval_only:
        yield f"warmup_iters={c.warmup_iters} is no shorter than the run: lr never reaches its peak"
    if c.dtype == "float16":
        yield "float16: the loss is scaled, and a step whose gradients overflow is skipped"
    if spec.kind == "cpu":
        yield from cpu_warnings()


def compile_summary(c, n_params):
    """Return what torch.compile is used for in this run, and why. The figures are records/bench/NOTES.md's."""
    if c.compile:
        model = "yes"
    else:
        model = "no (on a CPU it gained 8% at most, and lost with large models)" if c.device == "cpu" else "no"
    if c.device != "cpu":
        return f"the model: {model}; AdamW: {'yes' if c.compile_optimizer else 'no'}"
    saved_s = n_params * SAVED_BY_COMPILING
    if c.compile_optimizer:
        return f"the model: {model}; AdamW: yes ({duration(saved_s)} less a step)"
    return f"the model: {model}; AdamW: no (it would save {duration(saved_s * c.max_iters)}, and take up to 10 s)"


def compile_and_report(name, what, compile_it):
    """Return what compile_it() compiled, after printing how long it took; None where it failed, after printing why."""
    start = time.perf_counter()
    compiled, trouble = compile_it()
    if compiled is None:
        print(f"warning     torch.compile failed, so {name} is eager: {trouble}", flush=True)
    else:
        print(f"compiled    {what}, in {time.perf_counter() - start:.1f} s", flush=True)
    return compiled
