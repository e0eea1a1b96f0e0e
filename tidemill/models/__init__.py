"""Decoders, their weights and fingerprints, tokenizers and chat templates."""
