"""The native engine behind OpenAI's HTTP interface, in one process."""
