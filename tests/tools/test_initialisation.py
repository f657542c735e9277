"""The figure that shows what Xavier initialisation does, compared with the recorded one."""

import json
import math

import pytest

from config import ROOT
from tools import initialisation


def test_the_recorded_figure_is_what_the_code_computes():
    recorded = json.loads((ROOT / "records" / "init" / "variance.json").read_text(encoding="utf-8"))
    for name, curve in initialisation.measure().items():
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(curve, recorded[name], strict=True))
    assert (ROOT / "records" / "init" / "variance.svg").read_text(encoding="utf-8") == initialisation.svg(recorded)
    assert len(recorded["xavier"]) == 25
    assert all(0.5 < variance < 2 for variance in recorded["xavier"])
    growth = [b / a for a, b in zip(recorded["normal"], recorded["normal"][1:], strict=False)]
    assert all(0.8 * 256 < g < 1.2 * 256 for g in growth)  # each layer multiplies the variance by its fan_in


def test_the_command_writes_both_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(initialisation, "FOLDER", tmp_path)
    curves = {"normal": [1.0, 256.0], "xavier": [1.0, 1.1]}
    monkeypatch.setattr(initialisation, "measure", lambda: curves)
    assert initialisation.main([]) == 0
    assert json.loads((tmp_path / "variance.json").read_text(encoding="utf-8")) == curves
    assert (tmp_path / "variance.svg").read_text(encoding="utf-8") == initialisation.svg(curves)
    assert initialisation.main(["more"]) == 2
    with pytest.raises(SystemExit):
        initialisation.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m tools.initialisation")
