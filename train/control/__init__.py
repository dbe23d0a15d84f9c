"""A job's ranks seen from outside: started together, commanded, watched, stopped at one point.

Never: It imports no torch where it runs in a supervisor (group.py, rank_host.py).
Begin with group.py.
"""
