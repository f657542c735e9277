"""What this machine does: matmul and copy speed, memory of a process and of a step, times of single operations.

May import: the core, ops, hardware, and the operations of estimate. May not: be imported by estimate.
"""
