"""Stored answers of /v1/responses and kept chat completions: saved, looked up by owner, listed, deleted when they
expire; and responses in background.

Never: Calls an engine; the gateway does.
Begin with stored.py.
"""
