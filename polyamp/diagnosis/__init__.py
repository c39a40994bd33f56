"""Questions about a run: why it fails, how it goes, and whether it is as accurate.

Each verb has a file of its name; but `calibrate` is in diagnose.py, and `watch` in health.py.
"""
