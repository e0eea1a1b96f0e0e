"""Parts that engines behind an HTTP server share."""
