"""The project's benchmark suite: real models, one runner that both times and verifies. README.md is
the protocol.
"""
