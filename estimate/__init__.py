"""Predictions: the list of a training step's operations, and all that is computed from it. torch is not needed.

step.py and layers.py write down the operations of a step, with the buffers that each operation reads and writes
(tape.py). Memory, FLOPs and time are sums over this list, and it answers every question of accounting.py.

May import: config, cli, hardware, ops.choices. May not: torch or numpy, ever.
"""
