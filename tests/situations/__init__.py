"""Programs as users write them, each run three times: plain, accelerated, and compiled through the
backend. What is seen must be equal.

One file a kind. A scene is a function of `door`: `door(module, *args)` gives what to call in the
module's place. It builds its whole world itself, acts, and returns what it saw.
"""
