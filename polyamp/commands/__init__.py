"""The commands that examine a user's own step, and what they share."""
