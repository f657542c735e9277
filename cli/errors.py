"""Errors for a user's mistakes, and the wrapper that prints them as one line on stderr.

The exit status is 2 for a mistake, and 3 for a run that does not fit into memory.
"""

import contextlib
import functools
import os
import sys

from cli.packages import too_old


class ConfigError(Exception):
    """A user's mistake. The message is one line: what is wrong, where, and what to do about it."""

    status = 2  # the exit status of a command that ends with this error


class DoesNotFit(ConfigError):
    """The command line is correct, but the run does not fit into the memory of the device."""

    status = 3


def require(condition, message):
    if not condition:
        raise ConfigError(message)


def command(main):
    """Wrap the main(argv) of a script: it prints a ConfigError as one line on stderr, and returns its exit status."""

    @functools.wraps(main)
    def wrapped(argv=None):
        set_up_streams()
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except ConfigError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return error.status
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of a pipe has closed it, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return wrapped


def set_up_streams():
    """Print any text: a character that the terminal's encoding lacks is escaped. Read UTF-8."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # another kind of stream, or one already in use
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")
        if not sys.stdin.isatty():  # Windows would read a file or a pipe in another encoding
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def exit_on_mistake(read):
    """Exit if the command line has a mistake or torch is too old. A script calls this before it imports torch."""

    def checked(argv):
        read(argv)
        problem = too_old("torch")
        require(not problem, problem)

    status = command(checked)()
    if status:
        sys.exit(status)
