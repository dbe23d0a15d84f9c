"""A version as bytes: safetensors header, layout, manifest, checksums, arithmetic of slices.

Never: It allocates no memory and takes no lock.
Begin with layout.py.
"""
