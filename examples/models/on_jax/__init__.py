"""Models of the founding tables in JAX."""
