"""Calls with gradients: a training step made to be measured, and second derivatives."""
