"""A traced step's graph: read, decided by the flow rule, planned and written again."""
