"""Describes a replica without torch: its spec, memory size and settings, and the fingerprints of versions.

Never: Starts anything.
Begin with spec.py.
"""
