"""Imports the modules of sources in the worker, and calls them as programs do."""
