"""Versions of models in service: activation, canaries and their decision, and whether a model fits.

Never: It moves no weights; it writes which version is wanted.
Begin with canaries.py.
"""
