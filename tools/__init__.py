"""Commands that training does not need: report draws a run, tensors explains tensors, initialisation draws a figure.

Each of them can be deleted without a change elsewhere, except that `accounting.py --tensors` starts tools.tensors.

May import: every folder except benchmarks. May not: be imported outside this folder.
"""
