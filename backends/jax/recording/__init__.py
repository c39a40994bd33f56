"""Records of one training step: a step is traced, and evaluated once more with a sample kept of every tensor."""
