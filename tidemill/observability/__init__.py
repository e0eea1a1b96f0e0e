"""What a run tells about itself: metrics to sinks, spans to trace.json, progress to the terminal. Vocabulary only."""
