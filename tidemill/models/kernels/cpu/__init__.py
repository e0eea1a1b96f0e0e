"""Kernels in C for CPUs, compiled on first use, with the Python that checks and calls them."""
