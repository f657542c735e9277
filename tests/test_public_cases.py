"""records/public_cases.md: each case has a verdict, each named test exists, and the counts are those of the tables."""

import ast
import collections
import functools
import re

import pytest

from config import ROOT

TEXT = (ROOT / "records" / "public_cases.md").read_text(encoding="utf-8")
LINES = TEXT.splitlines()
HEAD = "| case | source | what happened there | what happens here | verdict |"
VERDICTS = ("holds", "fixed now", "not yet", "does not apply")
WORK = {"GPU", "several processes", "published weights", "reliability"}  # what a case may wait for
REPOSITORY = r"[\w.-]+/[\w.-]+"
ISSUE = r"(?:#| PR#)\d+(?: \([TP]\))?"
SOURCE = re.compile(rf"{REPOSITORY}{ISSUE}(?:, (?:#|PR#)\d+(?: \([TP]\))?)*")
COMMAND = re.compile(r"`(?:\w+=\S+ )?python [^`]+`")


def rows():
    """Yield the cells of each case."""
    cases = False
    for line in LINES:
        cases = line == HEAD or (cases and line.startswith("|"))
        if cases and line != HEAD and not line.startswith("|---"):
            yield tuple(cell.strip() for cell in line.strip("|").split("|"))


CASES = list(rows())
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@functools.cache
def functions_of(file):
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def verdict_of(case):
    return case[-1].partition(":")[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_case_says_where_it_is_from_what_happens_here_and_its_verdict(case):
    assert len(case) == 5 and all(case)
    name, source, there, here, verdict = case
    assert not re.match(r"[A-Z]\d", name)  # a subject, no number of somebody's list
    assert all(SOURCE.fullmatch(part) for part in source.split("; ")), source
    assert there.endswith(".")
    kind, colon, work = verdict.partition(": ")
    assert kind in VERDICTS
    assert bool(colon) == (kind == "not yet") and (not colon or set(work.split(", ")) <= WORK)
    tests = re.findall(r"`tests/[\w/]+\.py::\w+`", here)
    if kind in ("holds", "fixed now"):
        assert tests or COMMAND.search(here)
    if kind == "fixed now":
        assert tests


def test_cases_are_named_apart():
    assert len(CASES) > 100 and len({case[0] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("file, test", NAMED, ids=lambda part: part)
def test_a_test_that_is_named_exists(file, test):
    assert (ROOT / file).is_file() and test.startswith("test_") and test in functions_of(file)


def test_whatever_looks_like_a_test_is_named_in_full():
    assert len(NAMED) > 80
    assert set(re.findall(r"\w*test_\w+", TEXT)) <= {
        *(test for _, test in NAMED), *(file.split("/")[-1].removesuffix(".py") for file, _ in NAMED),
        "test_public_cases", "test_gpu",
    }  # fmt: skip


def test_the_counts_are_those_of_the_tables():
    counts = collections.Counter(map(verdict_of, CASES))
    heads = LINES.index("| " + " | ".join(VERDICTS) + " | in all |")
    counted = [int(n) for n in re.findall(r"\d+", LINES[heads + 2])]
    assert counted == [*(counts[verdict] for verdict in VERDICTS), len(CASES)]


def test_its_lines_can_be_read():
    assert [line for line in LINES if len(line) > 160 and not line.startswith("|")] == []
    assert TEXT.isascii()
