"""Files of a run on disk: run folders, model folders, checkpoints and their manifests."""
