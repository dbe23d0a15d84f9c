"""Keeps one request, or one owner's many, from slowing all others of an engine: bounds of steps, turns, places.

Never: Decides how many devices a model gets, or counts what an owner used.
Begin with step_bounds.py, owner_places.py.
"""
