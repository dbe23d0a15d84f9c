"""Discovers the devices of this node and judges their health.

It never assigns devices.
Begin with discovery.py.
"""
