"""The effect of precision on a model: recordings of one step, and the core's conclusions from them."""
