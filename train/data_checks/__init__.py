"""Says what is in a data file before a device is taken, and makes a better one of it: duplicates, near duplicates,
validation examples among those for training, what is too long, empty or oddly encoded, personal data, listed words.

Never: Uses a device, changes a file that it reads, or runs in a process that serves anybody else.
Begin with process.py, then scan.py.
"""
