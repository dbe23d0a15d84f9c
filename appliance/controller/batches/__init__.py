"""Batches and background responses: checked line by line, run on idle engines, completed exactly once.

Never: Takes an engine from interactive requests or from training (share.py).
Begin with runner.py, then work.py.
"""
