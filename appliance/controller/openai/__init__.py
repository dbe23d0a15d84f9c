"""The routes of fine-tuning jobs, their plans, checkpoints and queue, and of models.

Never: Starts work; it writes the wanted state to the store and the scheduler acts on it.
Begin with job_routes.py.
"""
