"""Weight versions and training snapshots as safetensors bytes: their format, shared memory, tiers.

Reading order: format.layout -> memory.store -> format.slices -> tiers.copies.
"""
