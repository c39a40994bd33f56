"""Interfaces of other libraries for JAX, on polyamp's loss scale and policies."""
