"""Tuning: time the likeliest schedules of a model's prefill GEMMs on this card, and keep what wins.

| module | owns |
| --- | --- |
| sweep | what is to be timed: the model's own kernels and the candidates; built, exported, loaded |
| measure | candidates checked, then timed against the kernel that is used now |

generator/search.py proposes candidates; futransformer/tables.py says which table later builds go by.
"""
