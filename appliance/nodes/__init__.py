"""Which machines belong to the box: its certificate authority and the enrolment of a new node.

Never: It starts no Ray and moves no bytes of models.
Begin with enrolment.py.
"""
