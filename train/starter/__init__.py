"""Pretrains the `starter` model on this machine: a small, honestly labelled Llama for boxes without any model.

Never: Takes part in a job; it runs in a process of its own.
Begin with main.py.
"""
