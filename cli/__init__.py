"""The parts of a command line: errors for a user's mistakes, flags, config files, numbers and units as text.

May import: the standard library. May not: any other folder of this project, so that all of them can use this one.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (every command comes here first, and a clone checks nothing else)
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")
