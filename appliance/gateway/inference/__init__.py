"""One inference request from its head to the last byte of its answer, retries and continuation included.

Never: It chooses no replica (routing does) and decides no right (access does).
Begin with handler.py, then placement.py.
"""
