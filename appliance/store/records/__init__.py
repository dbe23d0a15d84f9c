"""Tables of what the box itself keeps: keys, usage, audit, deployments, canaries, hand-overs, windows.

Never: One file reads and writes one table; no rule of the API stands here.
Begin with keys.py.
"""
