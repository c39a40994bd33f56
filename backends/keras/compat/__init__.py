"""Interfaces that Keras removed, on polyamp's policies and optimizer."""
