"""How to add a layer type, as the diff that adds one, and that every question is then answered for it.

The diff adds GEGLU (Shazeer 2020), a gated MLP with GELU in place of SiLU: its name where settings are declared, its
forward in the model, the same forward in the list of operations. The last line puts it into the grid of shapes that the
tests of the estimates compare with torch.
"""

import os
import shutil
import subprocess
import sys

import pytest

from config import ROOT

DIFF = {
    "config.py": '''
-    activation: Literal["gelu", "relu2", "swiglu"] = "gelu"
+    activation: Literal["gelu", "relu2", "swiglu", "geglu"] = "gelu"
''',
    "model.py": '''
-            h = F.silu(gate) * value
+            h = (F.gelu(gate) if self.config.activation == "geglu" else F.silu(gate)) * value
''',
    "estimate/layers.py": '''
-        gate = tape.apply("silu", (gate,), inner, h.dtype, (gate,))
+        kind = "gelu" if c.activation == "geglu" else "silu"
+        gate = tape.apply(kind, (gate,), inner, h.dtype, (gate,))
''',
    "tests/estimate/helpers.py": '''
-    "mlp": {"model": "mlp"},
+    "mlp": {"model": "mlp"},
+    "geglu": {"activation": "geglu", "bias": True},
''',
}  # fmt: skip


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a copy of the code with the diff applied."""
    copy = tmp_path_factory.mktemp("fork") / "napkin"
    ignored = shutil.ignore_patterns(".git", "records", "out*", "*.bin", "__pycache__", ".*_cache", "*.local.json")
    shutil.copytree(ROOT, copy, ignore=ignored)
    for file, change in DIFF.items():
        lines = change.strip("\n").splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        text = (copy / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} no longer has the line that the diff replaces: {old}"
        (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def run(folder, *arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, *arguments]
    done = subprocess.run(line, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_diff_is_of_a_few_lines():
    code = [line for file, change in DIFF.items() if "tests/" not in file for line in change.strip().splitlines()]
    assert sum(line.startswith("+") for line in code) <= 5


def test_the_prediction_is_compared_with_torch(changed):
    """Parameters, FLOPs, saved bytes and the peak, by the tests that compare every other layer."""
    printed = run(changed, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "tests/estimate", "-k", "geglu")
    assert int(printed.split(" passed")[0].split()[-1]) >= 10 and "failed" not in printed


def test_every_question_is_answered(changed):
    words = ["accounting.py", "--activation=geglu", "--vocab_size=50304", "--gpu=h100-sxm"]
    for question in ([], ["--explain"], ["--roofline"], ["--techniques"], ["--n_gpus=8"], ["--json"]):
        assert run(changed, *words, *question)
