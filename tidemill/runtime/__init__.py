"""Role processes: start, watch, call and reap them, in this process or others."""
