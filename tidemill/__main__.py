"""`python -m tidemill`: the command line."""

from tidemill.cli.main import main

main()
