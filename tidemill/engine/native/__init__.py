"""The native engine: paged KV cache, continuous batching, exact logprobs, updates between steps."""
