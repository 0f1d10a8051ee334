"""The pictures of the documentation; ``python -m docs.figures`` draws all of them again.

svg.py      what is drawn with
layouts.py  pictures of layouts: meshes, cuts of a product, boxes of a checkpoint
runs.py     pictures of runs: memory of ZeRO, Gemini's chunks, pipelines, rings, experts
"""
