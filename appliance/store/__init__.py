"""The box's only truth, one SQLite database: opened, migrated, kept writable on a full disk.

Never: Decides; tables stand in the packages below, one file each.
Begin with database.py; what reads beside the writer is readers.py, in turns by reading_threads.py.
"""
