"""Processes that read untrusted models: these convert other formats to safetensors, and test whether checkpoints load.

Never: Runs code of a file, or writes anywhere but into the given directory.
Begin with gguf.py.
"""
