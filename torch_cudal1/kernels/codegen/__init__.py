"""From expressions to text and machine code: loop nests, tiles, Triton printers, and the compilers."""
