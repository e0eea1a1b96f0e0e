"""The native trainer: samples to packed micro-batches to one optimizer step, and the weights to whoever serves them."""
