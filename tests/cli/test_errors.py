"""Every command prints and reads text whatever the terminal's encoding."""

import ast
import os
import subprocess
import sys

import pytest

from config import ROOT
from tests.test_imports import SOURCES

TEXT = "± é字🙂 \udcff"
ECHO = f"""
from cli.errors import command
import sys

@command
def main(argv):
    print({TEXT!a})
    print(ascii(sys.stdin.read()))

sys.exit(main())
"""


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_what_a_terminal_cannot_show_is_escaped_and_ends_no_run(encoding):
    """As on Windows, where a pipe has the encoding of the region, or in a container without a locale."""
    environment = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-c", ECHO]
    done = subprocess.run(command, cwd=ROOT, env=environment, input="é字🙂".encode(), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    shown, read = done.stdout.splitlines()
    assert shown == TEXT.encode(encoding, errors="backslashreplace")
    assert read == ascii("é字🙂").encode()  # a pipe's text is UTF-8 on every system


def test_input_that_is_not_utf_8_is_not_taken_for_something_else():
    done = subprocess.run([sys.executable, "-c", ECHO], cwd=ROOT, input=b"caf\xe9", capture_output=True)
    assert done.returncode == 1 and b"UnicodeDecodeError" in done.stderr  # sample.py makes one line of it


def test_every_command_is_wrapped():
    """So that what holds for one command holds for all: its streams, its errors of one line, its exit status."""
    commands = []
    for module, path in SOURCES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" for node in tree.body):
            mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
            commands += [module for main in mains if "command" in map(ast.unparse, main.decorator_list)]
            unwrapped = module in ("benchmarks.worker", "benchmarks.readme")  # which no user types
            assert module in commands or unwrapped, f"{module}: its main(argv) lacks @command"
    assert {"train", "accounting", "sample", "data.prepare", "tools.report", "benchmarks.__main__"} <= set(commands)
