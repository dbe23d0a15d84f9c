"""/v1/files and /v1/uploads: writes user files to disk, each completely or not at all.

Never: Parses a file's contents; the code that uses a file checks them.
Begin with storage.py.
"""
