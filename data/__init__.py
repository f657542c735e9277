"""From text to tokens to batches: the command prepare.py, the format of the files it writes, and the loader.

May import: cli, hardware, and config in prepare.py. May not: the model.
"""
