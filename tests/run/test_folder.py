"""A run's data and folder: what is resumed is the same run, what is overwritten is asked for, data is found."""

import dataclasses
import re
import subprocess
import weakref

import config
import train
from cli.config_file import read_settings
from config import Config
from run import checkpoint
from tests.training import RESUMED, assert_same_run, files_and_times, letters, read_metrics, write_data

# --- resuming


def test_20_steps_equal_10_and_10_more(run, tmp_path):
    settings = RESUMED | {"eval_interval": 10}
    printed = run(out="straight", max_iters=20, **settings)
    assert "400 tokens an epoch, 3.20 epochs in all" in printed  # so an epoch ends in each half
    run(out="halves", max_iters=10, **settings)
    run("--init_from=resume", out="halves", max_iters=20, **settings)
    assert_same_run(tmp_path / "straight", tmp_path / "halves")
    steps, evaluations = read_metrics(tmp_path / "halves")
    assert [r["step"] for r in steps] == list(range(20))
    assert [r["step"] for r in evaluations] == [10, 20]
    assert all(r["grad_norm"] > settings["grad_clip"] for r in steps)


def test_what_changed_is_said_on_resume(run, tmp_path):
    run(max_iters=2)
    printed = run("--init_from=resume", max_iters=4, learning_rate=5e-4, warmup_iters=1)
    assert "changed since the checkpoint: max_iters was 2, is 4 from here on" in printed
    assert "changed since the checkpoint: learning_rate was 0.001, is 0.0005 from here on" in printed
    assert printed.count("changed since") == 3
    lrs = [r["lr"] for r in read_metrics(tmp_path / "out")[0]]
    assert lrs[1] > 6e-4 and lrs[2] <= 5e-4


def test_resume_refuses_another_architecture_and_a_finished_run(run, tmp_path):
    run(max_iters=2)
    before = sorted(tmp_path.rglob("*"))
    error = run("--init_from=resume", status=2, n_layer=3, n_embd=64)
    assert "the checkpoint was trained with n_layer=2, n_embd=32" in error and "to resume, set the same" in error
    for last in (2, 1):
        error = run("--init_from=resume", status=2, max_iters=last)
        assert f"the run is at step 2 of max_iters={last}; to continue, raise --max_iters" in error
    assert sorted(tmp_path.rglob("*")) == before


def test_resume_without_a_checkpoint(run, tmp_path):
    assert f"{tmp_path / 'out'}: no checkpoint there; train first" in run("--init_from=resume", status=2)
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_does_not_hold_its_checkpoint(run, monkeypatch):
    run(max_iters=2)
    load, watched = checkpoint.load, []

    def watching(path):
        saved = load(path)
        watched.extend(weakref.ref(t) for part in ("weights", "optimizer") for t in saved[part].values())
        return saved

    monkeypatch.setattr(checkpoint, "load", watching)
    monkeypatch.setattr(train, "evaluate", lambda *arguments: float(sum(r() is not None for r in watched)))
    printed = run("--init_from=resume", max_iters=4)
    assert len(watched) > 10 and "validation loss 0.0000" in printed  # none of them is alive once steps were taken


# --- the folder


def test_a_second_run_names_both_ways_on(run, tmp_path):
    run(max_iters=4, eval_interval=2)
    out_dir = tmp_path / "out"
    mine = {"notes.txt": "keep", "step_notes.md": "keep", "step_plans/plan.txt": "keep"}
    for name, text in mine.items():
        (out_dir / name).parent.mkdir(exist_ok=True)
        (out_dir / name).write_text(text, encoding="utf-8")
    before = files_and_times(out_dir)
    error = run(status=2)
    assert f"{out_dir} holds an earlier run: --init_from=resume continues it, --overwrite discards it" in error
    assert "choose one" in run("--overwrite", "--init_from=resume", status=2, max_iters=6)
    assert files_and_times(out_dir) == before

    run("--overwrite", max_iters=3)
    assert sorted(p.name for p in out_dir.glob("step_0*")) == ["step_00000003"]
    assert [r["step"] for r in read_metrics(out_dir)[0]] == [0, 1, 2]
    assert {name: (out_dir / name).read_text(encoding="utf-8") for name in mine} == mine


def test_the_settings_of_a_run_are_kept_resolved(run, tmp_path):
    run(max_iters=1)
    kept = Config(**read_settings(tmp_path / "out" / "config.py", Config))
    assert dataclasses.asdict(kept) == checkpoint.load(tmp_path / "out")["state"]["config"]
    assert kept.d_ff == 128 and kept.vocab_size == 257 and kept.compile is False


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = run(out="file/out", status=2)
    assert f"{tmp_path / 'file' / 'out'}: cannot be written (Not a directory); --out_dir names another folder" in error


# --- the data


def test_a_corpus_that_could_not_be_prepared(run, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr("run.folder.subprocess.run", lambda *args, **kwargs: subprocess.CompletedProcess([], 2))
    assert "data/prepare.py stdlib failed; see its message above" in run(dataset="stdlib", status=2)
    assert list(tmp_path.iterdir()) == []


def test_data_of_another_tokenizer_stops_the_run_where_it_is_met(run, tmp_path):
    folder = tmp_path / "nanogpt"  # without a meta.json, nothing is known of its ids beforehand
    write_data(folder, letters(900), letters(200), {}, 0)
    (folder / "meta.json").unlink()
    error = run(dataset=folder, vocab_size=100, status=2)
    assert re.search(r"train\.bin: id \d+ at token \d+ is beyond vocab_size=100; the data was made with another", error)
    assert not checkpoint.exists(tmp_path / "out")
