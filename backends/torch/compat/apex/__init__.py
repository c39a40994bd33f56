"""The package `apex`, as far as mixed precision goes, on polyamp."""
