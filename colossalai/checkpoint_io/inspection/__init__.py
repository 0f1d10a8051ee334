"""What the command line does with checkpoints: show, verify and convert them, without the model."""
