"""Rules for the repository as a whole: which room may import which, text encodings, nothing executed, requirements."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.readme import CORE

ROOT = Path(__file__).resolve().parents[1]
STANDARD = set(sys.stdlib_module_names)


# What each room may import of this project, lowest first. A room may import itself, and those above it in this table.
MAY_IMPORT = {
    "cli": "",
    "hardware": "cli",
    "ops": "",
    "data": "cli",
    "config": "cli data.format ops.choices",
    "model": "ops",
    "optimizer": "ops",
    "trainer": "data.loader model ops optimizer",
    "estimate": "cli config hardware ops.choices",
    "measure": "cli estimate hardware model ops optimizer",
    "run": "cli config data estimate measure model ops optimizer",
    "benchmarks": "cli config data estimate hardware measure model ops optimizer trainer",
    "tools": "cli config data estimate hardware measure model ops optimizer run trainer",
}
# Commands may import every room but tools, and nothing imports them.
COMMANDS = ["train", "accounting", "sample", "data.prepare"]
WITHOUT_TORCH = ["cli", "hardware", "ops.choices", "data.format", "config", "estimate", "accounting"]


def name_of(path):
    return str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


FOLDERS = [name for name in MAY_IMPORT if (ROOT / name).is_dir()]
PATHS = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]
SOURCES = {name_of(path): path for path in sorted(PATHS)}


def imports(path):
    """Return the modules a file imports, anywhere in it; `from a import b` counts as a.b where that is a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inside & SOURCES.keys()) | ({node.module} if inside - SOURCES.keys() else set())
    return found


def is_in(module, rooms):
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def test_the_table_names_every_room_once_and_no_room_imports_upwards():
    assert {name.split(".")[0] for name in SOURCES} == MAY_IMPORT.keys() | {c for c in COMMANDS if "." not in c}
    rooms = list(MAY_IMPORT)
    for i, (room, allowed) in enumerate(MAY_IMPORT.items()):
        for other in allowed.split():
            assert other.split(".")[0] in rooms[:i], f"{room} may import {other}, which is not below it"


@pytest.mark.parametrize("module", SOURCES)
def test_a_file_imports_only_what_its_room_may(module):
    own = {m for m in imports(SOURCES[module]) if m.split(".")[0] in MAY_IMPORT or m in SOURCES}
    if module in COMMANDS:
        not_allowed = {m for m in own if m in COMMANDS or is_in(m, ["tools"])}
    else:
        room = module.split(".")[0]
        not_allowed = {m for m in own if m in COMMANDS or not is_in(m, [room, *MAY_IMPORT[room].split()])}
    assert not not_allowed, f"{module} imports {not_allowed}"


@pytest.mark.parametrize("module", SOURCES)
def test_no_import_leads_back_to_where_it_started(module):
    reached, waiting = set(), [module]
    while waiting:
        for found in imports(SOURCES[waiting.pop()]) & SOURCES.keys() - reached:
            reached.add(found)
            waiting.append(found)
    assert module not in reached


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_it_is_for_and_what_it_may_import(folder):
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text(encoding="utf-8")))
    assert "May import: " in text and "May not: " in text and len(text.splitlines()) <= 10


def test_predictions_need_neither_torch_nor_numpy():
    modules = sorted(name for name in SOURCES if is_in(name, WITHOUT_TORCH))
    code = "import sys; sys.modules |= {'torch': None, 'numpy': None}\n"  # None: to import it raises ImportError
    code += "import " + ", ".join(modules) + "\nsys.exit(accounting.main(['configs/gpt2.py', '--gpu=h100-sxm']))"
    assert "accounting" in modules and "estimate.roofline" in modules
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "peak" in done.stdout, done.stderr


def test_the_core_stays_small(record_property):
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in CORE}
    print(f"\nthe core: {sum(lines.values()):,} lines: {lines}")
    assert sum(lines.values()) <= 1500


def test_requirements_are_what_is_imported():
    def packages(file):
        lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines())
        return {re.split("[>=]", line)[0] for line in lines if line and not line.startswith("-")}

    top = {m.split(".")[0] for path in SOURCES.values() for m in imports(path)}
    imported = top - STANDARD - {name.split(".")[0] for name in SOURCES}
    # wandb and matplotlib are optional; requests is tiktoken's own requirement
    assert imported - {"wandb", "matplotlib", "requests"} == packages("requirements.txt")
    assert packages("requirements.txt") | packages("requirements-dev.txt") == packages("constraints.txt")


@pytest.mark.parametrize("module", SOURCES)
def test_text_is_opened_as_utf_8_and_nothing_is_executed(module):
    path = SOURCES[module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        where = f"{module}:{node.lineno}"
        if called in ("read_text", "write_text") and isinstance(node.func, ast.Attribute):
            assert any(k.arg in ("encoding", "errors") for k in node.keywords), f"{where}: no encoding named"
        if called == "open" and ast.unparse(node.func) != "os.open":
            modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
            modes += [ast.unparse(k.value) for k in node.keywords if k.arg == "mode"]
            named = any(k.arg == "encoding" for k in node.keywords)
            assert named or any("b" in str(mode) for mode in modes), f"{where}: no encoding named"
        executes = isinstance(node.func, ast.Name) and called in ("eval", "exec", "__import__")
        assert not executes, f"{where} executes text"
    assert not imports(path) & {"pickle", "marshal", "shelve", "dill"}, f"{module} can load code"


def test_records_hold_no_programs():
    assert [p for p in (ROOT / "records").rglob("*.py") if p.name != "config.py"] == []
