"""Strategies of operations: every way to cut them over a mesh, and what each costs."""
