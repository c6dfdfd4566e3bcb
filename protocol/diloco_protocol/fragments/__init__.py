"""How a model is split into fragments, which one is due when, and how a split is shown."""
