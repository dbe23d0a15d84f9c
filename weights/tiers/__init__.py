"""Copies of versions on disks and remote stores: plain directories, and packed objects that share bytes.

Never: It decides no schedule; appliance.tiers does.
Begin with copies.py, packed.py.
"""
