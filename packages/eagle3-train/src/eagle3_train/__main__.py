"""`python -m eagle3_train`, the way worker processes are started."""

import sys

from eagle3_train.cli import main

sys.exit(main())
