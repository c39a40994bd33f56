"""A traced function: run again with each operation in the format that the flow rule decides, and its plan."""
