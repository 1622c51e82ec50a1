"""One thread a process, set before torch is imported: test processes share the cores, and waiting threads would block them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
