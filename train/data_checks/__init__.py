"""Checks a data file before a job takes a device, and writes its examples as tokens. Reports duplicates, near
duplicates, overlap with the validation file, personal data, and examples that are too long, empty or unusable.

Never: Uses a device, changes a file that it reads, or runs in a process that also serves clients.
Begin with process.py, then check.py.
"""
