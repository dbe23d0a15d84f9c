"""Weighs and checks the bodies of requests. Pure functions over bytes.

Never: It opens no socket, reads no clock and holds no state.
Begin with request_check.py.
"""
