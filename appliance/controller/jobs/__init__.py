"""A fine-tuning job from its row to its end: its settings, fit check, validation of its data, events, pauses.

Never: Places a job on devices; the scheduler reads the job's row and places it.
Begin with settings.py, then events.py.
"""
