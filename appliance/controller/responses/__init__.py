"""Stored answers of /v1/responses: kept, found by owner, listed as items, deleted when due.

Never: It asks no engine; that is done by the gateway, or by a batch for responses in background.
Begin with stored.py.
"""
