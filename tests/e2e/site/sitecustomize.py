"""Gives an interpreter from outside the virtual environment its packages, .pth files (editable installs) included."""

import os
import site

site.addsitedir(os.environ["PACKAGES_OF_TESTS"])
