"""The command line: arguments, commands, what a terminal and a page show. Imports any room;
training adds its command by entry point.

Read `torch_cudal1.__main__`, then the module of a command.
"""
