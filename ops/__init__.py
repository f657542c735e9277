"""Operations that are written by hand because torch's are slower or take more memory. choices.py says which are used.

May import: ops. May not: the model, so that each operation can be read and copied alone. choices.py needs no torch.
"""
