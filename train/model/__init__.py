"""The model that is trained: attention over packed rows, adapters, loss, learning rate, tensor parallelism.

Never: It writes nothing and knows no step loop.
Begin with model.py.
"""
