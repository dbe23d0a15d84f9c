"""Copies versions and snapshots between shared memory and tiers: the local disk, and a remote directory or S3.

Never: Decides when to copy; appliance.tiers does.
Begin with copies.py.
"""
