"""Stored answers of /v1/responses: saved, looked up by owner, listed as items, deleted when they expire.

Never: Calls an engine; the gateway does, or a batch for background responses.
Begin with stored.py.
"""
