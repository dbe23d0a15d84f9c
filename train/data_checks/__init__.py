"""Reports what is in a data file before a job takes a device, and makes a better file from it: duplicates, near
duplicates, validation examples among those for training, examples that are too long, empty or oddly encoded, personal
data, listed words.

Never: Uses a device, changes a file that it reads, or runs in a process that serves anybody else.
Begin with process.py, then scan.py.
"""
