"""Engines that are servers with OpenAI's `/v1/completions`, which sample and score and are never updated."""
