"""What precision does to a model: records of one step, and what the core says of them."""
