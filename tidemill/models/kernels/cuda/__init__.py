"""Kernels in Triton for CUDA devices, with the Python that checks and calls them."""
