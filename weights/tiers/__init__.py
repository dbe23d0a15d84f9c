"""Copies versions and snapshots to the local disk and to one remote place, a directory or S3, and back.

Never: Decides when; appliance.tiers does.
Begin with copies.py.
"""
