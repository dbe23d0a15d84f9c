"""Tables of what users make: files, uploads, jobs, batches, responses, models and adapters.

Never: One file reads and writes one table; no rule of the API stands here.
Begin with jobs.py.
"""
