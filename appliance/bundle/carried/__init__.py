"""What a bundle carries to check and install itself with: Python's standard library alone, in any file's reach.

Never: Imports anything but the standard library, or trusts a byte that the signed manifest does not name.
Begin with main.py, then archive.py (what the file is), signature.py, install.py and releases.py (where it goes).
"""
