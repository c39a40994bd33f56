"""Recordings of one training step, which is traced, then evaluated once more with every tensor counted."""
