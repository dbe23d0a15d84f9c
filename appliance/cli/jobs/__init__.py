"""Commands about fine-tuning jobs, their files, batches and evaluations.

Never: Decides: each is a thin client of the OpenAI and admin APIs.
Begin with job.py.
"""
