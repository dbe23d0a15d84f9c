"""Commands that do more than one request: each is a function with its options and its help.

Never: Decides: each is a thin client of the OpenAI and admin APIs.
Begin with jobs.py.
"""
