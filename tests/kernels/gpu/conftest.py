"""These tests need a GPU, or else Triton's interpreter from the start of their process; test_triton.py gives it one."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]
