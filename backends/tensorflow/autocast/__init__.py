"""Ambient autocast for eager code."""
