"""Native trainer: packs samples into micro-batches, takes optimizer steps, publishes the weights."""
