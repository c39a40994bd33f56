"""How the compiled extension is built, found, loaded and checked; ``build.py`` above is the command."""
