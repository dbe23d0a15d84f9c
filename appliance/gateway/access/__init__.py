"""Checks what a key may do: admission by the head, per-minute allowances, quotas, and sums of usage.

Never: It reads no body.
Begin with admission.py.
"""
