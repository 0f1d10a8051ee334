"""The documented place of helpers that build models."""
