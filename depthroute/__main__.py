"""`python -m depthroute`."""

import sys

from depthroute.cli.main import main

sys.exit(main())
