"""Names that adapters give to parts of a graph, so that a graph rewriter can find them."""

UPDATE_SCOPE = "polyamp_update"
"""The name scope of unscaling, clipping and the optimizer's arithmetic. A rewrite leaves them as written.

>>> f"train/{UPDATE_SCOPE}/adam/mul".split("/")
['train', 'polyamp_update', 'adam', 'mul']
"""

FINITE = "polyamp_finite"
"""The name of the scalar boolean that decides whether a step is applied."""
