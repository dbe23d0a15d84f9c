"""Describes a replica (spec, memory, settings, parsers, errors) without importing torch.

Never: Starts a process.
Begin with spec.py.
"""
