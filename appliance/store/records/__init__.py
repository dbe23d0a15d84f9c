"""Tables of what the box itself keeps: keys, usage, audit, deployments, canaries, hand-overs, windows.

Never: Holds a rule of the API; each file has the tables of one kind of record.
Begin with keys.py.
"""
