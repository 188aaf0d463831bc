"""These tests need Triton's interpreter from the start of their process; test_triton.py gives them one."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
