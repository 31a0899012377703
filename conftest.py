"""Kernels run in Triton's interpreter: no GPU is needed to know that they compute what they should.

Triton reads the variable when it is first imported, so it is set before any other test file is.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
