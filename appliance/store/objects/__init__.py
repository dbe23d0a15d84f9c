"""Tables of what users make: files, uploads, jobs, batches, responses, evaluations, models
and adapters.

Never: Holds a rule of the API; each file has the tables of one kind of object.
Begin with jobs.py.
"""
