"""Pretrains the `starter` model on this machine: a small, honestly labelled Llama for boxes without any model.

Never: Jobs do not use it; it runs in its own process.
Begin with main.py.
"""
