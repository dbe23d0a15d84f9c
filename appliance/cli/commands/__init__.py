"""Commands that need more than one request: each is a function with its options and help.

Never: Makes decisions: each command is a thin client of the OpenAI and admin APIs.
Begin with jobs.py.
"""
