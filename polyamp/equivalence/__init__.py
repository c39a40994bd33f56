"""Tests whether a policy trains as well as float32, by equivalence of runs over seeds."""
