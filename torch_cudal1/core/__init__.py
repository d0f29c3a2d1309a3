"""What every room stands on: errors, settings, counters and events, and the values that `explain`
answers with.

Imports nothing else of the package, and PyTorch only where a function needs it. `settings` is the
one file that reads the environment, `errors` holds every exception the package raises. Read
`errors`, then `settings`.
"""
