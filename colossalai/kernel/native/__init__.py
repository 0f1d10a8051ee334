"""Kernels in C for the host, compiled with the machine's own compiler the first time they are used.

They are an optional speed-up: where there is no compiler, plain PyTorch does the same.
"""
