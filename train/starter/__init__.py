"""The `starter` model: a small, honestly labelled Llama that is pretrained here, where no model is at hand.

Never: No job uses it; it runs in a process of its own.
Begin with main.py.
"""
