"""Builds the trained model: attention over packed rows, adapters, quantised layers, tensor parallelism.

Never: Writes files or runs a step loop.
Begin with model.py.
"""
