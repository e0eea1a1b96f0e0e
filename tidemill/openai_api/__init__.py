"""OpenAI's HTTP shapes: request bodies, replies, errors, and tokens as text."""
