"""Reads examples as people write them: JSON of any origin, turns under any names, pairs, and files of other formats.

Never: Chooses a shape (train.data.formats), or knows a tokenizer or a method.
Begin with records.py, then messages.py.
"""
