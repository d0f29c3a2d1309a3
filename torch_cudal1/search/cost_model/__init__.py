"""Predicts kernel times from earlier timings: records on disk, a random forest, cross-validation.

Predictions only order what is measured first. Nothing here runs a candidate, judges whether it is
correct, or decides what runs.
"""
