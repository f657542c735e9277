"""Writes records: measured figures with the commit, the command and the environment that they come from."""

import json
import re
import shlex
import subprocess
import time

from config import ROOT

RECORDS = ROOT / "records" / "bench"


def write_rows(options, argv, environment, rows):
    """Write the rows of `python -m benchmarks ARGV` to records/bench/NAME.json."""
    if options.peer:
        environment = environment | {"peer": git(options.peer, "rev-parse", "HEAD")}
    arguments = [re.sub(r"^(--(?:peer|input)=).*", r"\1PATH", a) for a in argv]  # folders of the user stay private
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    write_record(RECORDS / f"{options.record}.json", command, environment, {"rows": rows})


def write_record(path, command, environment, content):
    """Write the measured content to a JSON file, with the commit, the command, the time and the environment."""
    # records/**/config.py are part of the records, not of the code that is measured.
    changed = git(ROOT, "status", "--porcelain", "--", "*.py", ":!records/**/config.py")
    record = {
        "commit": git(ROOT, "rev-parse", "HEAD") + (" with uncommitted changes" if changed else ""),
        "command": command,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "environment": environment,
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def git(folder, *arguments):
    """Return the output of a git command in a folder, or "" if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
