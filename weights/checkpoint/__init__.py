"""Checks an untrusted checkpoint at import: files, sampling defaults and chat template.

Never: Loads a model or runs code from its files.
Begin with folder.py.
"""
