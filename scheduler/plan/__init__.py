"""Plans which holder gets which devices: shares, queue, exact devices. Pure functions of a snapshot and a time.

Never: Knows how devices change hands, or any current state outside the snapshot.
Begin with plan.py.
"""
