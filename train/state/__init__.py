"""What a run writes and reads back: fragments of ZeRO, snapshots, published versions, parked ranks.

Never: It never decides when; the step loop does.
Begin with snapshot.py, then saving.py.
"""
