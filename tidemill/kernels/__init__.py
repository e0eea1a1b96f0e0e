"""Small compiled kernels, where PyTorch has no fast way to say what is meant. Nothing needs them.

For the CPU they are a few files of C, compiled on first use by the machine's own compiler and kept in the user's cache
(`library`); for CUDA devices they are in Triton, which comes with PyTorch's CUDA builds (`gpu`). Whoever calls one has the
same in PyTorch or NumPy, for machines without a compiler.
"""
