"""How many replicas of each model should be awake, and until when, learned from the traffic.

Never: It knows no device.
Begin with demand.py.
"""
