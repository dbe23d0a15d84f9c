"""Manages LoRA adapters on a running engine: finds them by name, loads them on demand, unloads unused ones.

Never: It trains and stores no adapters.
Begin with adapters.py.
"""
