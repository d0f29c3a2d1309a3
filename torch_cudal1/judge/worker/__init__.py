"""The code that runs inside a candidate's process: no reference, no tolerance, no verdict."""
