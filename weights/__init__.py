"""Stores weight versions and training snapshots as safetensors files: their format, shared memory, tiers.

Reading order: format.layout -> memory.store -> format.torch_views -> tiers.copies.
"""
