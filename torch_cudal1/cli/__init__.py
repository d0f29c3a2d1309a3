"""The command line: arguments, commands, what a terminal and a page show. Imports any room;
training adds its command by entry point.

Read `cli.parser`, then the module of a command.
"""
