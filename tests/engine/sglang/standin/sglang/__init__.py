"""A stand-in for the package `sglang`, so that `python -m sglang.launch_server` starts the fake server."""
