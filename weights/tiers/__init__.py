"""Copies versions to disks and remote stores, as plain directories or as packed objects that share bytes.

Never: Schedules copies; appliance.tiers does.
Begin with copies.py, packed.py.
"""
