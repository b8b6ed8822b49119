"""What is here needs a GPU: ``cupy.sh`` and ``torch.sh`` collect it, a run of all tests not."""

import os

collect_ignore_glob = [] if "PLSH_GPU" in os.environ else ["cupy_*.py", "torch_*.py"]
