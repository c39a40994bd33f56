"""Builds, finds, loads and checks the compiled extension; ``build.py`` above is the command."""
