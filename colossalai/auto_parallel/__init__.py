"""Plans that are found, not written: which activations are kept, and which are computed again."""
