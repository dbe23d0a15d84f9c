"""Moves devices between holders: which holders move, the steps and their undo, the journal, the verbs' interface.

Never: Decides who should hold a device; the caller passes the wanted allocation.
Begin with handover.py.
"""
