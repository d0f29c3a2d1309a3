"""The CUDA driver and compiler, reached with ctypes: modules, launches, cubins and NVRTC, without a
toolkit.
"""
