"""Processes that read somebody's model: those that turn other formats into safetensors, and the trial of a tokenizer.

Never: Runs code that a file brings, or writes anything but the directory that it was given.
Begin with gguf.py.
"""
