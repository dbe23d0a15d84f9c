"""Processes that read untrusted models: they convert other formats to safetensors, and try checkpoints.

Never: Runs code of a file, or writes anywhere but into the given directory.
Begin with gguf.py.
"""
