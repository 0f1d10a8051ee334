"""A fuzzer: random models, plans and habits, compared with plain PyTorch; ``python -m colossalai.testing.fuzz
--help``.
"""
