"""Who should hold which devices: shares, queue, exact devices. Pure functions of a snapshot and a time.

Never: It knows neither how devices change hands nor what they hold now beyond the snapshot.
Begin with plan.py.
"""
