"""Handles one inference request from its head to the last byte of its answer, with retries and continuation.

Never: Chooses a replica (routing does) or checks a permission (access does).
Begin with inference.py.
"""
