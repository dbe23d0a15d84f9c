"""Batches: checked line by line, asked through the gateway, completed exactly once.

Never: Chooses an engine or counts a cost (the gateway does).
Begin with batches.py.
"""
