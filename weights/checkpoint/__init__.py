"""Decides whether a model's folder may be opened: what its settings may contain, and which files may be beside its
weights.

Never: Loads a model or runs anything of its files.
Begin with folder.py.
"""
