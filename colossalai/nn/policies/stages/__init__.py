"""An existing model in a pipeline: ``depth`` and ``derive_depth`` (where it is cut), ``stage`` (what a rank
holds of it), ``stand_ins`` (for what it does not hold), ``per_block`` (outputs that no stage has whole).
"""
