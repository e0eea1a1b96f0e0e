"""`python -m tidemill.cli`: the same as `python -m tidemill`."""

from tidemill.cli.main import main

main()
