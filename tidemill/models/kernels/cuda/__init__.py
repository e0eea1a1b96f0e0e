"""CUDA kernels in Triton, with the Python that checks and calls them."""
