"""What is cut in an existing model, and how: tables of rules, and what the rules do to modules.

Read in this order: ``hugging_face`` (which module of which architecture is cut how) or ``model_own_plan``
(what the model's config says of it), ``policy``, ``rules`` (what can be done to a module); for mixtures of
experts ``experts``, ``balance_loss`` and ``latent_attention``; ``causal_loss`` and ``cut_cache`` (losses and
caches of pieces); ``adapters`` (PEFT) and ``own_hooks`` (what a script has hung on modules).
"""
