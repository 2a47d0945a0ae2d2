"""python -m kvstore_service.kvctl"""

import sys

from kvstore_service.kvctl import main

sys.exit(main())
