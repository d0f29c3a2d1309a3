"""ATen operators as expressions, a family a file; Triton's text of each element-wise one."""
