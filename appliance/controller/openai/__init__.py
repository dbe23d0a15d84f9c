"""The OpenAI routes of fine-tuning jobs, their checkpoints, and models.

Never: Starts work; it writes the wanted state to the store and the scheduler acts on it.
Begin with job_routes.py.
"""
