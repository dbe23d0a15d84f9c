"""What a replica is and what it takes: its spec, memory, settings, fingerprints of versions. No torch.

Never: It starts nothing.
Begin with spec.py.
"""
