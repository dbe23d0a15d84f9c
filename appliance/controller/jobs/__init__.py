"""The life of a fine-tuning job: its settings, fit check, validation of its data, events and pauses.

Never: Places a job on devices; the scheduler reads the job's row and places it.
Begin with settings.py, then events.py.
"""
