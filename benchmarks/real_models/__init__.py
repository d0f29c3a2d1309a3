"""Real models: transformers, timm and own code, unmodified, with random weights.

`python -m benchmarks.real_models -h` shows the options. `zoo` has the models, `columns` the ways of
running one, `column_process` the process that prepares one column of one model, and `__main__` the
runner, which prepares columns side by side and times each alone.
"""
