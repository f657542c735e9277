"""Measurements of this trainer, alone or alternating with a nanoGPT checkout: python -m benchmarks --help

growth, step_time, learning and record_run are programs of their own. They write the records that README.md quotes.

May import: every folder except run and tools. May not: have a training step of its own; all take trainer.py's.
"""
