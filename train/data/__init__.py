"""Converts a file of examples to rows of tokens: lines, formats, checks, chat templates, packing.

Never: Uses a device, or any part of a model but its tokenizer.
Begin with check.py, formats.py and token_set.py.
"""
