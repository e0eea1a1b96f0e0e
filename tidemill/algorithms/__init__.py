"""RL algorithms: from scored groups to samples, per-token losses and their scale."""
