"""`python -m onefold`."""

import sys

from onefold.cli import main

sys.exit(main())
