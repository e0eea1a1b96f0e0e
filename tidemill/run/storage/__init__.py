"""What lies on disk: run folders, model folders, checkpoints and their manifests."""
