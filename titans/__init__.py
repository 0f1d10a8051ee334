"""Models, losses and data loaders written once on ``colossalai``'s layers."""
