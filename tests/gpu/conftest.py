"""What is here needs a GPU: ``cupy.sh`` collects it, a run of all tests does not."""

import os

collect_ignore_glob = [] if "PLSH_GPU" in os.environ else ["cupy_*.py"]
