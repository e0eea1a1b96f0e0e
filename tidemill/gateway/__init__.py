"""The gateway: a chat of an episode as an HTTP API, for agents that are programs of their own."""
