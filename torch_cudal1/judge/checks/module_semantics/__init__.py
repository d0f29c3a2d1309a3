"""Checks of what a source's module does with its parameters, modes and gradients."""
