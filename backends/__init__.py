"""The adapters that come with polyamp, one package for each framework."""
