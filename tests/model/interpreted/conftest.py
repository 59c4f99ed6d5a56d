"""Run by tests/kernels/test_kernels.py, in a process where triton interprets its kernels."""

from sluice.kernels.launch import INTERPRETED

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
