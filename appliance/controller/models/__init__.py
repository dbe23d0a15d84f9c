"""Model versions in service: activation, canaries and their decision, and checks whether a job fits.

Never: Moves weights; it writes which version is wanted.
Begin with activation.py.
"""
