"""What a job is and what it takes: its spec, automatic hyperparameters, memory. No torch.

Never: It starts nothing and reads no data.
Begin with spec.py.
"""
