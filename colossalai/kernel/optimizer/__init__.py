"""Optimizer steps on many tensors at once: Adam, LAMB, LARS and SGD, and what they need: lists of tensors,
snapshots to roll back to, float32 numbers split in two halves.
"""
