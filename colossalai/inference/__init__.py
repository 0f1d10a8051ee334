"""Generation: a model, whole or cut over ranks, writes text for many requests at once."""

from colossalai.inference.generator import Generator
from colossalai.inference.loading import load_model
from colossalai.inference.requests import Completion, Event, GeneratorStats, Sampling, TokenLogprobs

__all__ = ["Completion", "Event", "Generator", "GeneratorStats", "Sampling", "TokenLogprobs", "load_model"]
