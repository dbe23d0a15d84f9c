"""Describes a replica without torch: its spec, memory size and settings, and the fingerprints of versions.

Never: It starts nothing.
Begin with spec.py.
"""
