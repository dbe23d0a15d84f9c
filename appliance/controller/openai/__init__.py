"""Objects of the API under /v1, a module each: batches, models, and fine-tuning jobs with plans, checkpoints and queue.

Never: Starts work; it writes the wanted state to the store and the scheduler acts on it.
Begin with job_routes.py.
"""
