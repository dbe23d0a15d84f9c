"""Commands about fine-tuning jobs, their files and curves, evaluations and batches.

Never: Decides: each is a thin client of the OpenAI and admin APIs.
Begin with job.py.
"""
