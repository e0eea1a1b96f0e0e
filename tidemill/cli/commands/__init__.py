"""The commands, one module each; `cli.main` imports one only when it is called."""
