"""Kernels from language models: endpoints and policies, prompts, answers, the database of what was
measured.
"""
