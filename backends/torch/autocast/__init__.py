"""Ambient autocast: regions, the operations that they override, and casts of weights."""
