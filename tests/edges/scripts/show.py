"""Knows nothing of rerail: shows its arguments and its place."""

import os
import sys

print(f"rank {os.environ['RANK']} arguments {' '.join(sys.argv[1:])}", flush=True)
