"""How devices change hands: steps, their rules, the journal, and the verbs that touch the world.

Never: It never decides who should hold a device; it is given what is wanted.
Begin with handover.py, then runner.py.
"""
