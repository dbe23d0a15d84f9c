"""Checkpoints of other formats turned into safetensors that engines and trainers load, each in a process of its own.

Never: Runs code that a file brings, or writes anything but the directory that it was given.
Begin with gguf.py.
"""
