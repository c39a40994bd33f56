"""Plugins for trainers, one module for each. Only importing such a module imports its trainer."""
