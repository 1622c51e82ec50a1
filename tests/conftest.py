"""One thread a process, set before torch is imported: test processes share the cores, and waiting threads would block them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # what is printed must not depend on the terminal that the tests are started from
