"""Describes a replica without torch: its spec, memory, settings, parsers and errors.

Never: Starts a process.
Begin with spec.py.
"""
