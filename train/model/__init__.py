"""Builds the trained model: attention over packed rows, adapters, loss, learning rate, tensor parallelism.

Never: It writes no files and runs no step loop.
Begin with model.py.
"""
