"""Recordings of one training step: every tensor's spread, counted in the graph that computes it."""
