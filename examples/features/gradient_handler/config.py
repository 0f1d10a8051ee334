"""A gradient handler in the place of DDP."""

BATCH_SIZE = 128

gradient_handler = [dict(type="WatchedHandler")]
