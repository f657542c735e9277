"""What a run keeps and prints: its folder, checkpoints, preflight, log and ledger.

May import: estimate, measure and the core. May not: change the arithmetic of a step.
"""
