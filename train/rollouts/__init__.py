"""Owns the samples of a step of a method that learns from the model's own answers: which prompts they answer, the file
that holds them and their verdict, the model that engines sample from, and the rows that a rank makes of them.

Never: Asks a model or grades (appliance.controller.grading.rollouts does); decides what is learnt (train.methods).
Begin with samples.py.
"""
