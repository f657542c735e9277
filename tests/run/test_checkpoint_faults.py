"""Checkpoints that cannot be written, or are being written at a kill: the earlier ones stay whole."""

import errno
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback

import pytest
import torch
from safetensors import SafetensorError

from cli.errors import ConfigError
from run import checkpoint
from run.checkpoint import exists, load, save
from tests.run.small_runs import contents, run_of, state_at, tensors_of

# --- failing writes


def disk_is_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(function, n, failure):
    """Return the function, whose n-th call from now fails."""
    calls = itertools.count()
    return lambda *args, **kwargs: (failure if next(calls) == n else function)(*args, **kwargs)


def save_fails(out_dir, is_best=True):
    """Save step 2 after step 1, in vain, and check what was promised; return the step that is the latest now."""
    run = run_of()
    earlier = save(out_dir, run, state_at(1), is_best=True)
    before = contents(earlier)
    yield
    with pytest.raises(ConfigError) as caught:
        save(out_dir, run, state_at(2), is_best)
    message = str(caught.value)
    assert message.startswith(f"{out_dir / 'step_00000002'}: the checkpoint could not be written (")
    assert message.endswith("); earlier ones are untouched") and "\n" not in message
    assert contents(earlier) == before
    assert not [path for path in out_dir.iterdir() if path.name.startswith(".")]
    yield load(out_dir)["state"]["step"]


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("kind", ["OSError", "SafetensorError"])
def test_tensors_that_cannot_be_written(tmp_path, monkeypatch, n, kind):
    def failure(*_):
        if kind == "SafetensorError":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        disk_is_full()

    attempt = save_fails(tmp_path)
    next(attempt)
    monkeypatch.setattr(checkpoint, "save_file", failing_at(checkpoint.save_file, n, failure))
    assert next(attempt) == 1
    assert not (tmp_path / "step_00000002").exists()


def test_a_disk_that_is_full_at_any_sync(tmp_path, monkeypatch):
    fsync, steps = os.fsync, []
    for n in range(100):
        out_dir = tmp_path / str(n)
        attempt = save_fails(out_dir)
        next(attempt)
        calls = failing_at(fsync, n, disk_is_full)
        monkeypatch.setattr(os, "fsync", calls)
        try:
            steps.append(next(attempt))
        except pytest.fail.Exception:  # the save needed fewer syncs: all were tried
            break
        finally:
            monkeypatch.setattr(os, "fsync", fsync)
    assert len(steps) >= 8  # four files, the folder, its parent, the pointers
    assert steps == sorted(steps) and steps[:7] == [1] * 7


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_file_that_the_system_lets_grow_no_further(tmp_path, name):
    """The system refuses a byte before the end, and safetensors wraps that in an error of its own."""
    attempt = save_fails(tmp_path)
    next(attempt)
    limit = (tmp_path / "step_00000001" / name).stat().st_size - 1
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, earlier[1]))
    try:
        assert next(attempt) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


def test_an_out_dir_that_is_a_file(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="the checkpoint could not be written"):
        save(tmp_path / "out", run_of(), state_at(1), is_best=False)


def test_an_interrupted_save_leaves_no_temporary(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save(tmp_path, run_of(), state_at(1), is_best=False)
    monkeypatch.setattr(checkpoint, "save_file", failing_at(checkpoint.save_file, 1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, run_of(), state_at(2), is_best=False)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "latest"}


# --- kills


def filled(run, value):
    """Let every tensor of the run hold one value, so that a mixture of two saves shows."""
    for tensor in tensors_of(run).values():
        with torch.no_grad():
            tensor.fill_(value)
    return run


def whole(path):
    """Return the step of a checkpoint, having checked that every tensor is that step's."""
    saved = load(path)
    step = saved["state"]["step"]
    for tensor in (saved["weights"] | saved["optimizer"]).values():
        assert (tensor == step).all()
    return step


def best_of(out_dir):
    return out_dir / (out_dir / "best").read_text(encoding="utf-8").strip()


def in_a_process(function, *args):
    """Run function(*args) in a fresh process, which may fork: no thread of torch's is alive there yet."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0, "its error is on stderr"


def forked(function, *args):
    """Start function(*args) in a fork and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def save_until_killed(out_dir, first_step):
    run = run_of()
    for step in itertools.count(first_step):
        save(out_dir, filled(run, step), state_at(step), is_best=step % 3 == 0)


def kill_at_random_moments(out_dir):
    moments, step = random.Random(0), 0
    for _ in range(12):
        child = forked(save_until_killed, out_dir, step + 1)
        deadline = time.monotonic() + 10
        while not (out_dir / f"step_{step + 1:08d}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL  # it had not ended by an error of its own
        if (out_dir / "best").exists():
            whole(best_of(out_dir))
        reached = whole(out_dir) if exists(out_dir) else 0
        assert reached >= step
        step = reached
    assert step > 12


def test_a_kill_at_a_random_moment_leaves_a_whole_latest_checkpoint(tmp_path):
    in_a_process(kill_at_random_moments, tmp_path / "out")


def save_and_be_killed(out_dir, n):
    """Save step 4, and be killed at the n-th thing that is done to a file."""
    run, events = filled(run_of(), 4), itertools.count()

    def hook(event, _):
        of_files = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")
        if of_files and next(events) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(out_dir, run, state_at(4), is_best=True)


def kill_at_every_event(folder):
    os.fsync = lambda _: None  # a kill, unlike a power cut, loses nothing that was written
    run, reached, leftovers = run_of(), [], 0
    for step in (1, 2, 3):
        save(folder / "before", filled(run, step), state_at(step), is_best=step == 1)
    for n in range(200):
        out_dir = shutil.copytree(folder / "before", folder / str(n))
        ended = os.waitpid(forked(save_and_be_killed, out_dir, n), 0)[1]
        reached.append(whole(out_dir))
        assert whole(best_of(out_dir)) in (1, 4)
        leftovers += any(out_dir.glob(".step_*.tmp"))
        save(out_dir, filled(run, 5), state_at(5), is_best=False)  # it goes well, and removes what the other left
        assert whole(out_dir) == 5 and not any(out_dir.glob(".step_*.tmp"))
        if ended != signal.SIGKILL:
            break
    assert ended == 0 and reached[-1] == 4  # the last one came through
    assert reached == sorted(reached) and reached.count(3) > 10 and reached.count(4) > 3 and leftovers > 5


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_latest_checkpoint(tmp_path):
    """The kill comes at each event in turn, until a save comes through."""
    in_a_process(kill_at_every_event, tmp_path)
