"""`polyamp run`: runs a script unmodified, with the modules that it lacks and a policy that it does not know."""
