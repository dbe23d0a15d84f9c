"""Which machines belong to the box: its certificate authority and the enrolment of a new node.

Never: Starts Ray or moves bytes of models.
Begin with enrolment.py.
"""
