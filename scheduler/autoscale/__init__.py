"""Decides how many replicas of each model should be awake, and for how long, from the observed traffic.

Never: Knows devices.
Begin with demand.py.
"""
