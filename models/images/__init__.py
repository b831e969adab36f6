"""Digits by a convolutional network with BatchNorm in Flax, trained in step."""
