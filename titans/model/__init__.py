"""Whole models; import them from their modules, for example ``from titans.model.gpt import GPT``."""
