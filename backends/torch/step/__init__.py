"""The wrapped optimizer's step. Read `optimizer.py` first: it has the order, and the other files its parts."""
