"""Implements the hand-over verbs with Ray: actors, reservations, engines, groups of ranks, further nodes.

Never: Decides anything. It is the only package of the scheduler that imports ray, train and serve.
Begin with effects.py.
"""
