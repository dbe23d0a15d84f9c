"""Defines a version's bytes: safetensors header, layout, manifest, checksums, slice arithmetic; and the forms of tools
in chats, which trainers, engines and gateways read alike.

Never: Allocates shared memory or takes a lock.
Begin with layout.py.
"""
