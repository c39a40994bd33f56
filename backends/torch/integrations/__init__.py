"""Plugins for trainers, one module for each. A module imports its trainer only when it is imported itself."""
