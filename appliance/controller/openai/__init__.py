"""The OpenAI routes over the store: jobs, checkpoints, models, batches, responses.

Never: It starts nothing itself: it writes what is wanted, and the scheduler makes it so.
Begin with job_routes.py.
"""
