"""The training loop of one rank, from its distributed start to its last checkpoint."""
