"""Backups of a box: its data directory in a folder or an S3 store elsewhere, taken while it runs, and the way back.

Never: Changes the data directory that it copies, or starts a box.
Begin with take.py, then restore.py; main.py runs both in a process of their own.
"""
