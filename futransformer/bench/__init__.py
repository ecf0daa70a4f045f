"""The benchmark: ours beside what a user would run instead, checked, interleaved, against measured ceilings.

| module | owns |
| --- | --- |
| case | what a case is: its work, its contenders, what they must compute |
| harness | timing: burst, sustained, steady |
| ceilings | what this card can do at most, measured in the same run |
| check | correctness, before anything is timed |
| llama | random blocks, caches and activations of a real shape |
| rivals/ | one module a family of rivals |
| subjects/ | one module a subject: its cases |
| runner | a subject's cases -> rows, within a budget |
| results | the files |
| report | results -> docs/performance.md, tables and plots |
| accuracy, accuracy_fp8, accuracy_int4 | kernels beside the reference on a real model and text, one precision |
| perplexity | what a quantised model costs beside its baseline |
| accuracy_report | results of those -> docs/accuracy.md |
"""
