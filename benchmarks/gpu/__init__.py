"""What gpu_check.py runs, one module per step."""
