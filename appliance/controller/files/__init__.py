"""/v1/files and /v1/uploads: bytes of users onto the disk, whole or not at all.

Never: It does not read what a file says; who uses a file checks it.
Begin with storage.py, then file_routes.py.
"""
