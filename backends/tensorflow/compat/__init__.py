"""Functions that TensorFlow removed."""
