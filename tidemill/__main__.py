"""`python -m tidemill`: the command line."""

from tidemill.cli import main

main()
