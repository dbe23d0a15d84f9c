"""Commands about the box: up, down, status, join, node, gpu, tier, key, usage, audit, forget.

Never: Decides: each is a thin client of the admin API.
Begin with box.py.
"""
