"""Whether a key may: admission by the head, allowances by the minute, quotas and sums of usage.

Never: It reads no body.
Begin with admission.py.
"""
