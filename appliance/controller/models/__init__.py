"""Model versions in service: activation, canaries and their decision, and whether a model fits.

Never: Moves weights; it writes which version is wanted.
Begin with activation.py.
"""
