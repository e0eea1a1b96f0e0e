"""Weight sync: transports that carry weights from the trainer to the engines, and their manifest."""
