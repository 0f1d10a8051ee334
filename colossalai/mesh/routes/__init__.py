"""From one layout to another: which collectives, in which order, and what they cost."""
