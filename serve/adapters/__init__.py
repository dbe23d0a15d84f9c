"""Manages LoRA adapters on a running engine: finds them by name, loads them on demand, unloads unused ones.

Never: Trains or stores adapters.
Begin with adapters.py.
"""
