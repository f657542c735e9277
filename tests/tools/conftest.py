"""A run's folder, which tools.report draws."""

import dataclasses
import json

import pytest

from config import dump
from estimate.predict import predict
from tests.tools.small_run import CPU, RECORDS, config_of


@pytest.fixture
def run_folder(tmp_path):
    """Return a function that writes a run's folder."""

    def write(device=CPU, records=RECORDS, measured=None, settings=None, without=()):
        config = config_of(device, **(settings or {}))
        prediction = predict(config, device)
        found = {"peak_bytes": prediction["memory"]["peak"] + 999, "step_s": 0.01, "timeline": None, **(measured or {})}
        content = {"prediction": prediction, "measured": found, "device": dataclasses.asdict(device)}
        content = {key: value for key, value in content.items() if key not in without}
        (tmp_path / "config.py").write_text(dump(config, "a run"), encoding="utf-8")
        (tmp_path / "ledger.json").write_text(json.dumps(content), encoding="utf-8")
        lines = "".join(json.dumps(r) + "\n" for r in records)
        (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
        return tmp_path

    return write
