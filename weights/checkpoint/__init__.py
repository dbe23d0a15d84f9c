"""Whether a model's folder may be opened: what its settings may say, what may stand beside its weights.

Never: Loads a model or runs anything of its files.
Begin with folder.py.
"""
