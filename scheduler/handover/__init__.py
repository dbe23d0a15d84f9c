"""Moves devices between holders: moves, their steps with their undo, the journal, and the interface of the verbs with side effects.

Never: Decides who should hold a device; the caller passes the wanted allocation.
Begin with handover.py, then moves.py.
"""
