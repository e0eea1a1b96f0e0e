"""`python -m tidemill.cli`: another name for `python -m tidemill`."""

from tidemill.cli.main import main

main()
