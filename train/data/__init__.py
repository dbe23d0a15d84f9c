"""Converts a file of examples to rows of tokens: lines, formats, chat templates, packing.

Never: Uses a device, or any part of a model except the tokenizer.
Begin with records.py, formats.py, chat.py and token_set.py.
"""
