"""What devices can do: the description of one, the table of accelerators with sources, this machine.

May import: cli. May not: torch or numpy, so that a prediction needs neither.
"""
