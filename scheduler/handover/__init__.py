"""Moves devices between holders, step by step with undo; defines the interfaces of verbs, journal and store.

Never: Decides who should hold a device; the caller passes the wanted allocation.
Begin with handover.py.
"""
