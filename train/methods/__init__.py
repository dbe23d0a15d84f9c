"""Training methods: one file for each says what is asked of it, what it reads, what it minimises and what it takes.

Never: It runs no step and moves no data; train.run and train.data ask the method's object. A method's own file imports
no torch until its objective is made.
Begin with method.py, then supervised.py and methods.py.
"""
