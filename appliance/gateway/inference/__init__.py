"""Handles one inference request from its head to the last byte of its answer, with retries and continuation.

Never: It chooses no replica (routing does) and checks no permission (access does).
Begin with handler.py, then placement.py.
"""
