"""LoRA adapters on a running engine: found by name, loaded when asked for, forgotten when not.

Never: It trains none and stores none.
Begin with adapters.py.
"""
