"""Makes `benchmarks` importable: it is part of the checkout, not of the installed distribution."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
