"""Autocast of functions, and the regions of a function that run under it."""
