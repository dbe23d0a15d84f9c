"""Judges a stranger's checkpoint at its import: its files, its sampling, what its chat template does.

Never: Loads a model or runs anything of its files.
Begin with folder.py.
"""
