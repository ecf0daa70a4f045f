"""Quantisation: weights to codes, the scales of activations by calibration, and the folder that keeps them."""
