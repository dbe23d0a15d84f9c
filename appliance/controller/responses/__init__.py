"""Stored answers of /v1/responses and kept chat completions: saved, looked up by owner, listed, deleted when they
expire.

Never: Calls an engine; the gateway does, or a batch for background responses.
Begin with stored.py.
"""
