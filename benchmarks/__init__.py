"""Measurements: one module a subject; what was measured stands in results/."""
