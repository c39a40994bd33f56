"""Models of the founding tables in Keras."""
