"""Discovers the devices of this node and judges their health.

Never: Assigns devices.
Begin with discovery.py.
"""
