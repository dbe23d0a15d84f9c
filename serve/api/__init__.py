"""Changes how vLLM reads requests and writes answers, where it differs from the APIs that it speaks.

Never: Touches weights or devices.
Begin with application.py.
"""
