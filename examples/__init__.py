"""Handwritten digits in each framework, as `polyamp demo` trains them; the other folders are not installed."""
