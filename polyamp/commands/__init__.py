"""The commands of the command line that look at a user's own step, and what they share."""
