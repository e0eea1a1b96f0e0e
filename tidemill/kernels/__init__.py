"""Small compiled kernels for the CPU, where PyTorch has no fast way to say what is meant. Nothing needs them.

They are one file of C, compiled on first use by the machine's own compiler and kept in the user's cache (`library`). Whoever
calls one has the same in PyTorch or NumPy, for machines without a compiler.
"""
