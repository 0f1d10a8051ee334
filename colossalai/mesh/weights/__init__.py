"""The values of weights: initial ones that depend on no plan, and models that get memory later."""
