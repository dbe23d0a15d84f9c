"""The OpenAI routes on top of the store: jobs, checkpoints, models, batches, responses.

Never: Starts work; it writes the wanted state to the store and the scheduler acts on it.
Begin with job_routes.py.
"""
