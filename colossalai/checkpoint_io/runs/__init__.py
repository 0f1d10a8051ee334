"""Checkpoints of whole runs: boxes of tensors in data files, and a manifest that says what is in them."""
