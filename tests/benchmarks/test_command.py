"""The command lines of the benchmarks: mistakes, help, and what --peer must name."""

import pytest

from benchmarks import __main__, growth, learning, record_run, step_time


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "no command given; write python -m benchmarks ceilings | train | "),
        (["ceiling"], "unknown command ceiling"),
        (["ceilings", "--jsn"], "did you mean json"),
        (["ceilings", "no.py"], "no.py"),
        (["ceilings", "--steps=3"], "--steps is not an option of ceilings"),
        (["startup", "--peer=x"], "--peer is not an option of startup"),
        (["train", "--n_layer=3"], "train has its own shapes"),
        (["train", "--shape=tiny,huge"], "unknown shape 'huge'; the shapes are tiny, small"),
        (["train", "--repetitions=0"], "at least 1"),
        (["train", "--record=a/b"], "without slashes"),
        (["train", "--peer=/no/such"], "--peer=/no/such: not a nanoGPT checkout"),
        (["prepare", "--workers=two"], "numbers separated by commas, such as 1,2"),
        (["loader", "--gigabytes=0"], "must be positive"),
    ],
)
def test_mistakes_are_one_line_and_status_2(argv, words, capsys):
    assert __main__.main(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    "file, text, words",
    [
        ("model.py", "class GPT: pass", "no model.py that defines GPTConfig"),
        ("model.py", "this is no Python", "no model.py that defines GPT and GPTConfig"),
        ("train.py", "", "no train.py that defines get_batch"),
    ],
)
def test_peer_must_name_a_checkout(checkout, capsys, file, text, words):
    (checkout / file).write_text(text, encoding="utf-8")
    assert __main__.main(["train", f"--peer={checkout}"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("program", [growth, learning, record_run, step_time])
def test_the_programs_that_write_records_explain_themselves_and_refuse_other_words(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    name = program.__name__
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: python -m {name}")
    assert program.main(["one", "two"]) == 2
    printed = capsys.readouterr()
    assert name.removeprefix("benchmarks.") in printed.err or "checkout" in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_record_run_trains_nothing_without_a_config(capsys):
    with pytest.raises(SystemExit):
        record_run.main(["name", "--"])
    assert capsys.readouterr().out.startswith("usage: ")
