"""A slow reference engine over `transformers`, for every causal model that it can load."""
