"""Training that an evaluator ends when the model gets no better."""
