"""Names that adapters give to parts of a graph, so that whoever rewrites the graph finds them."""

UPDATE_SCOPE = "polyamp_update"
"""The name scope of unscaling, clipping and the optimizer's arithmetic, which stay as they are written.

>>> f"train/{UPDATE_SCOPE}/adam/mul".split("/")
['train', 'polyamp_update', 'adam', 'mul']
"""

FINITE = "polyamp_finite"
"""The name of the scalar bool that says whether a step is applied."""
