"""Batches and responses in background: checked line by line, run on idle engines, ended exactly once.

Never: It never takes an engine from interactive requests or from training (share.py).
Begin with runner.py, then work.py.
"""
