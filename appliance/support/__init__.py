"""Packs what somebody else needs to see what is wrong with a box, without what is nobody else's business.

Never: Sends anything, or reads prompts, answers, training data, weights or the database.
Begin with main.py, then sources.py (what is packed), then redaction.py (what is replaced).
"""
