"""One strategy for every operation of a model: which dims of its tensors lie on which axis of the mesh."""
