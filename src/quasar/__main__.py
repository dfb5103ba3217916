"""`python -m quasar` is the command `quasar`."""

import sys

from quasar.cli.main import main

sys.exit(main())
