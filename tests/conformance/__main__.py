"""`python -m tests.conformance`, see `run.py`."""

import sys

from tests.conformance.run import main

sys.exit(main())
