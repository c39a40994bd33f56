"""Recordings of one training step: it is traced, then evaluated once more with every tensor counted."""
