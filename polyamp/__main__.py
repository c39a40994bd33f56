"""The entry point of ``python -m polyamp``."""

from polyamp.cli import main

main()
