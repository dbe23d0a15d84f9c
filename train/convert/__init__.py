"""Checkpoints of other formats turned into safetensors that engines and trainers load, each in a process of its own.

Never: It runs no code that a file brings, and writes nothing but the directory that it was given.
Begin with gguf.py.
"""
