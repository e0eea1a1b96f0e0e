"""Small compiled kernels, where PyTorch has no fast way to say what is meant. Nothing needs them.

For the CPU they are a few files of C (`native`), compiled on first use by the machine's own compiler and kept in the user's
cache; for CUDA devices they are in Triton (`gpu`), which comes with PyTorch's CUDA builds. `library` finds both.
Whoever calls one has the same in PyTorch or NumPy, for machines where there are none.
"""
