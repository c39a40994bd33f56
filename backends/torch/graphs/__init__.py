"""Modules as graphs with explicit casts: capture, decide, write, compile."""
