"""Stores weight versions and training snapshots as safetensors files, in shared memory and tiers.

Reading order: format.layout -> memory.store -> format.torch_views -> tiers.copies.
"""
