"""Plans are tried before a model is cut, and found by trying where there is no table.

``trace`` runs a plan on the meta device (``meta_inputs``), ``verify`` compares outputs on a few random
numbers (``weightless_twin``); ``branches``, ``branch_trial`` and ``derive`` find the plan of a model from its
code.
"""
