"""Draw a run, finished or still running: python -m tools.report OUT_DIR

The pictures are written into the run's folder. memory.png, roofline.png and mfu.png compare a prediction with what was
measured: bytes over a step, the step and its matmuls in the roofline of the device, and MFU. loss.png shows the loss. A
picture for which the run has no data is left out, and a line on stderr gives the reason.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from cli.config_file import read_settings
from cli.errors import ConfigError, command, require
from cli.flags import parse
from config import Config, check
from estimate.predict import predict
from hardware.spec import DeviceSpec
from tools.pictures import PICTURES, note

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:  # matplotlib is optional, because nothing else in the project needs it
    Figure = None


@dataclass(frozen=True)
class Options:
    """Draw a run as PNG files in its folder: memory, roofline, loss and mfu."""


@dataclass
class Run:
    """What the files in a run's folder say. `measured` and `curve` are empty until ledger.json has measurements."""

    folder: Path
    config: Config
    spec: DeviceSpec
    prediction: dict
    measured: dict
    curve: list[tuple[float, float]]  # (fraction of the step, bytes)
    records: list[dict]  # the lines of metrics.jsonl

    def series(self, *names):
        """Return the steps of all records that have the first figure, and the values of each figure in them."""
        records = [record for record in self.records if names[0] in record]
        values = ([finite_or_nan(record.get(name)) for record in records] for name in names)
        return [record["step"] for record in records], *values


@command
def main(argv):
    words, _ = parse(argv, (Options,), "python -m tools.report OUT_DIR")
    given = " ".join(words) or "none"
    require(len(words) == 1, f"give the folder of one run, as in python -m tools.report out; got {given}")
    require(Figure, "tools.report draws with matplotlib, which is not installed: pip install matplotlib")
    run = read_run(Path(words[0]))
    for name, (draw, title, legend) in PICTURES.items():
        path = run.folder / name
        canvas = FigureCanvasAgg(Figure(figsize=(8, 4.5), dpi=120, layout="constrained"))
        axes = canvas.figure.add_subplot()
        if missing := draw(run, axes):
            note(f"{name} left out: {missing}")
            continue
        canvas.figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
        axes.set_title(summary(run), loc="left", fontsize=8, color="#555555")
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        canvas.figure.legend(handles, labels, fontsize=8, frameon=False, **legend)
        try:
            canvas.print_png(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
        print(path, flush=True)
    return 0


def summary(run):
    """Return one line that describes the run."""
    c = run.config
    steps = f" × {c.gradient_accumulation_steps}" if c.gradient_accumulation_steps > 1 else ""
    where = c.device if run.spec.name == "unknown" else run.spec.name
    size = f"{c.n_layer} layers, width {c.n_embd}, context {c.block_size:,}, batch {c.batch_size}{steps}"
    return f"{c.model}, {size}, {c.dtype} on {where}"


def read_run(folder):
    """Return the Run of a folder. Only config.py must exist, because a run writes the other files later."""
    path = folder / "config.py"
    require(path.exists(), f"{path}: no such file; a run writes it: python train.py CONFIG.py --out_dir={folder}")
    config = Config(**read_settings(path, Config))
    check(config)
    resolved = config.vocab_size and config.n_kv_head and config.head_dim and config.d_ff and config.dtype != "auto"
    require(resolved, f"{path}: some settings are not resolved, so no run wrote this file; name the out_dir of a run")
    path = folder / "ledger.json"
    try:
        ledger = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        spec = DeviceSpec("unknown", "cpu" if config.device == "auto" else config.device.split(":")[0])
        if entry := ledger.get("device"):
            spec = DeviceSpec.from_dict(entry)
        prediction, measured = ledger.get("prediction") or predict(config, spec), ledger.get("measured") or {}
        curve = [(float(x), float(y)) for x, y in measured.get("timeline") or ()]
        prediction["memory"]["peak"] + len(prediction["time"])  # raises here if the pictures could not read it
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{path}: damaged ({type(error).__name__}: {error}); move it away to draw the run without it"
        raise ConfigError(problem) from None
    return Run(folder, config, spec, prediction, measured, curve, read_metrics(folder / "metrics.jsonl"))


def read_metrics(path):
    """Return the records of metrics.jsonl, or none if it does not exist. An unfinished last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); move it away to draw the run without it") from None
    records = []
    for i, line in enumerate(lines, 1):
        if line.endswith("\n"):
            try:
                records.append(json.loads(line))
                is_number = isinstance(records[-1]["step"], int)
                require(is_number, f"{path}:{i}: the step is not a number; remove the line to draw the others")
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError(f"{path}:{i}: damaged; remove the line to draw the others") from None
    return records


def finite_or_nan(x):
    """Return the figure of a record, or NaN if it is null, absent or not finite."""
    return x if isinstance(x, (int, float)) and math.isfinite(x) else math.nan


if __name__ == "__main__":
    sys.exit(main())
