"""`python -m tests.clients`, see `run.py`."""

import sys

from tests.clients.run import main

sys.exit(main())
