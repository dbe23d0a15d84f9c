"""Implements the hand-over verbs with Ray: actors, reservations, engines, groups of ranks, further nodes.

Never: Decides anything. No other package of the scheduler imports ray, train or serve.
Begin with effects.py.
"""
