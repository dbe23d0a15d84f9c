"""Defines training methods: hyperparameters, input records, loss and memory.

Never: Runs a step or moves data; train.trainer and train.data ask the method's object. A method's own file imports no
torch before its loss is computed.
Begin with method.py, then methods.py, which has them all.
"""
