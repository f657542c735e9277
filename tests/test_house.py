"""What holds for the house as a whole: who imports whom, how text is opened, what is never executed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {str(p.relative_to(ROOT)): p for folder in (ROOT, ROOT / "data") for p in sorted(folder.glob("*.py"))}
HOUSE = {name.removesuffix(".py").replace("/", ".") for name in SOURCES}
STANDARD = set(sys.stdlib_module_names)

# What each file may import of the house. Scripts, which nothing but tests imports, may import all but each other.
MAY_IMPORT = {
    "config": "",
    "hardware": "config",
    "units": "config",
    "schedule": "hardware",
    "prediction": "hardware schedule",
    "roofline": "config schedule units",
    "explain": "prediction schedule units",
    "planning": "cluster config hardware prediction schedule units",
    "tensors": "",
    "cluster": "config prediction schedule units",
    "techniques": "cluster prediction schedule units",
    "accounting": "cluster config explain hardware planning prediction roofline schedule techniques tensors units",
    "loss": "hardware",
    "attention": "hardware",
    "model": "attention hardware loss",  # for the one table of operations' dtypes
    "optimizer": "",
    "trainer": "data.loader model optimizer",
    "tokenizer": "config",
    "checkpoint": "config",
    "data.loader": "config",
    "data.workers": "config",
    "data.prepare": "config data.workers hardware tokenizer",
    "measure": "config hardware",
    "timing": "attention hardware loss measure model optimizer schedule",
    "ledger": "config measure units",
    "train": "accounting checkpoint config data.loader ledger measure model optimizer prediction timing tokenizer "
    "trainer units",
    "sample": "checkpoint config measure model tokenizer",
    "bench": "config hardware measure model optimizer peer prediction schedule timing tokenizer units",
    "peer": "config data.loader measure model optimizer trainer",
    "report": "config hardware prediction roofline schedule units",
}
STANDARD_LIBRARY_ONLY = [
    "config", "hardware", "units", "schedule", "prediction", "roofline", "explain", "planning", "accounting",
]  # fmt: skip


def imports(path):
    """Return the modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("file", SOURCES)
def test_who_imports_whom(file):
    name = file.removesuffix(".py").replace("/", ".")
    of_the_house = {m for m in imports(SOURCES[file]) if m in HOUSE}
    not_allowed = of_the_house - set(MAY_IMPORT[name].split())
    assert not not_allowed, f"{file} imports {not_allowed}"
    if name in STANDARD_LIBRARY_ONLY:
        outside = {m for m in imports(SOURCES[file]) if m.split(".")[0] not in STANDARD} - HOUSE
        assert not outside, f"{file} imports {outside}"


@pytest.mark.parametrize("module", sorted(STANDARD_LIBRARY_ONLY))
def test_the_arithmetic_loads_neither_torch_nor_numpy(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_requirements_are_what_is_imported():
    def packages(file):
        lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines())
        return {line.replace(">=", "==").split("==")[0] for line in lines if line and not line.startswith("-")}

    # wandb and matplotlib are options of the user's; requests is tiktoken's own requirement
    imported = (
        {m.split(".")[0] for path in SOURCES.values() for m in imports(path)}
        - STANDARD
        - {m.split(".")[0] for m in HOUSE}
    )
    assert imported - {"wandb", "matplotlib", "requests"} == packages("requirements.txt")
    assert packages("requirements.txt") | packages("requirements-dev.txt") == packages("constraints.txt")


@pytest.mark.parametrize("file", SOURCES)
def test_text_is_opened_as_utf_8_and_nothing_is_executed(file):
    for node in ast.walk(ast.parse(SOURCES[file].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        where = f"{file}:{node.lineno}"
        if called in ("read_text", "write_text") and isinstance(node.func, ast.Attribute):
            assert any(k.arg in ("encoding", "errors") for k in node.keywords), f"{where}: no encoding named"
        if called == "open" and ast.unparse(node.func) != "os.open":
            modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
            modes += [ast.unparse(k.value) for k in node.keywords if k.arg == "mode"]
            named = any(k.arg == "encoding" for k in node.keywords)
            assert named or any("b" in str(mode) for mode in modes), f"{where}: no encoding named"
        assert not (isinstance(node.func, ast.Name) and called in ("eval", "exec", "__import__")), (
            f"{where} executes text"
        )
    assert not imports(SOURCES[file]) & {"pickle", "marshal", "shelve", "dill"}, f"{file} can load code"
