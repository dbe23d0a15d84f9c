"""Handles samples for methods that learn from the model's own answers: the prompts to answer, the file with samples and
verdict, the weights that engines sample from, and the rows that a rank makes of samples.

Never: Asks a model or grades (appliance.controller.grading.rollouts does); decides what to train (train.methods).
Begin with samples.py.
"""
