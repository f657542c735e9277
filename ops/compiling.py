"""torch.compile, with its failures caught."""

import torch


def try_compiler(compiled):
    """Return (compiled(), None), or (None, why it failed). compiled() has to compile something and run it."""
    try:
        return compiled(), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no gcc, no Triton, an unknown card: each compiler has errors of another class
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]
