"""A fine-tuning job from request to end: its settings, fit check, validation of its data, events, pauses.

Never: Places a job on devices; the scheduler reads the job's row and places it.
Begin with requests.py, then settings.py, validation.py and events.py.
"""
