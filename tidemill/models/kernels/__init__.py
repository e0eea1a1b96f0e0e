"""Optional compiled kernels for operations that PyTorch has no fast form of.

For the CPU they are a few files of C (`native`), compiled on first use by the machine's own compiler and kept in the
user's cache; for CUDA devices they are in Triton (`gpu`), which comes with PyTorch's CUDA builds. `library` finds both.
Every caller has the same operation in PyTorch or NumPy, for machines without kernels.
"""
