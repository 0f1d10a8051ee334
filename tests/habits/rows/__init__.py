"""The rows of the table, by theme."""

ORDER = ("gradients", "passes", "weights", "modules", "optimizers", "saving")
