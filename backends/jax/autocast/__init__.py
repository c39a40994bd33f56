"""Autocast of functions."""
