"""`python -m kvcore`."""

import sys

from kvcore.cli import main

try:
    main()
except ModuleNotFoundError as error:  # from a checkout whose dependencies are not there
    sys.exit(f"kvcore: error: no package {error.name}: install kvcore's dependencies with pip install .")
