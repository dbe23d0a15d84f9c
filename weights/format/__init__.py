"""Defines a version's bytes: safetensors header, layout, manifest, checksums, slice arithmetic.

Never: It allocates no shared memory and takes no lock.
Begin with layout.py.
"""
