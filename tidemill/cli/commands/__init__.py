"""One module a command, or a family of them. Each is imported by `cli.main` only when it is called."""
