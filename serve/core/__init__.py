"""Describes a replica without torch: its spec, memory, settings, parsers and errors.

Never: Starts anything.
Begin with spec.py.
"""
