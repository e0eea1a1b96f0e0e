"""OpenAI's HTTP API as data: request bodies, replies, errors, and tokens as text."""
