"""CPU kernels in C, compiled on first use, with the Python that checks and calls them."""
