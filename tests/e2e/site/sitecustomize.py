"""Gives an interpreter from outside the virtual environment its packages, .pth files (editable installs) included."""

import os
import site

site.addsitedir(os.environ["HEADGATE_TEST_PACKAGES"])
