"""Recordings of one training step, which is run node by node with every tensor counted."""
