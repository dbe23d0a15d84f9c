"""Converts a file of examples to rows of tokens: formats, checks, chat templates, packing.

Never: Uses a device, or any part of a model but its tokenizer.
Begin with check.py, then token_set.py.
"""
