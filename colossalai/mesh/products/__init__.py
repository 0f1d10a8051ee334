"""Matrix products of tensors that are cut, for every tensor-parallel mode."""
