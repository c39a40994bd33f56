"""Records of one training step: it is traced, and evaluated once more with every tensor counted."""
