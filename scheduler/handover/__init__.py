"""Moves devices between holders: the moves, their steps and undo, and the interfaces of verbs and journal.

Never: Decides who should hold a device; the caller passes the wanted allocation.
Begin with handover.py.
"""
