"""Models: decoder, weight files and fingerprints, tokenizers, chat templates."""
