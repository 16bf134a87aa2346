"""Makes the helpers of other folders importable, as __main__.py does."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ('agents', 'end_to_end')]
