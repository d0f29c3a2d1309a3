"""placeholder"""

from contextlib import contextmanager


@contextmanager
def traceable():
    yield


def as_programs(module, device):
    return {}
