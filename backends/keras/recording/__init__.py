"""Recordings of one training step of a compiled model, made by the adapter of Keras' backend."""
