"""Recordings of one training step: every tensor's spread, counted in the graph that computes it."""

from __future__ import annotations

from polyamp.backends.tensorflow.recording.program import record

__all__ = ["record"]
