import os

import torch

# Tests run in several processes, which share the processor's cores; the variable is for the processes that tests start.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
