"""From a file of examples to rows of tokens: formats, checks, chat templates, packing.

Never: It knows no device and no model but its tokenizer.
Begin with check.py, then token_set.py.
"""
