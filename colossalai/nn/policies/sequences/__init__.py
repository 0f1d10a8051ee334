"""Long sequences of an existing model: ``probe`` (what its attention asks for), ``inputs`` and ``plan`` cut
them over ranks; ``causal_mask`` does without a tensor of the mask.
"""
