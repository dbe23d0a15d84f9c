"""Weight versions and training snapshots as safetensors bytes in shared memory.

`layout` plans and validates files, `store` reserves, commits, leases and evicts versions, `slices` is the
arithmetic of moving shards, `tiers` copies versions to and from disk, `torch_views` shows bytes as tensors.
"""
