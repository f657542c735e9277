"""A command with options of its own beside the settings, and one without, whose command lines are tested."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from cli.errors import ConfigError
from cli.flags import load
from config import Config

DEFAULTS = Config()
USAGE = "python command.py CONFIG.py ..."


@dataclass(frozen=True)
class NoOptions:
    """Do something with the settings alone."""


@dataclass(frozen=True)
class Options:
    """Do something with a model."""

    gpu: str | None = None  # a card
    mode: Literal["fast", "slow"] = "fast"
    dry: bool = False  # touch nothing
    share: float = 0.5
    limit: str | None = field(default=None, metadata={"bare": ""})  # how much; bare: only show it


def given(argv, options=NoOptions):
    """Return (config, options) of a command line."""
    return load(argv, Config, options, USAGE)


def changed(argv):
    """Return what a command line changes of the defaults."""
    settings, _ = given(argv)
    return {name: value for name, value in vars(settings).items() if value != getattr(DEFAULTS, name)}


def refused(argv, options=NoOptions):
    """Return what a command line is refused with: one line."""
    with pytest.raises(ConfigError) as caught:
        given(argv, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
