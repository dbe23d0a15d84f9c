"""A fine-tuning job from the request to its end: claims, whether it fits, validation of its data, events, pauses.

Never: It never places a job on devices; the scheduler reads the row and does.
Begin with requests.py, then validation.py and events.py.
"""
