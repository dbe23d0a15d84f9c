"""Defines the format of a version: safetensors header, layout, manifest, checksums, slice arithmetic.

Never: Allocates shared memory or takes a lock.
Begin with layout.py.
"""
