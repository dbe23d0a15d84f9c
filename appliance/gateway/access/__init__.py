"""Checks what a key may do: admission by the head, per-minute allowances, quotas, and sums of usage.

Never: Reads a body.
Begin with auth.py.
"""
