"""What is here runs Triton's interpreter, which must be chosen before Triton is imported.

`test_torch_cuda.py` starts a process of its own for it; a run of all tests does not collect it.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*.py"]
