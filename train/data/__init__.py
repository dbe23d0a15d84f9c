"""Converts a file of examples to rows of tokens: formats, checks, chat templates, packing.

Never: It uses no device, and no part of a model but its tokenizer.
Begin with check.py, then token_set.py.
"""
