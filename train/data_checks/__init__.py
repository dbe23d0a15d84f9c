"""Checks a data file before a job takes a device, and writes its examples as tokens. Reports duplicates, near
duplicates, overlap with the validation file, examples that are too long, empty or unusable, personal data.

Never: Uses a device, changes a file that it reads, or runs in a process that serves anybody else.
Begin with process.py, then check.py.
"""
