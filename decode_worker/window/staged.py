"""A window in a GPU's memory, which the daemon fills by copies of the driver, from pinned memory."""

from decode_worker.window.imported import ImportedWindow


class StagedWindow(ImportedWindow):
    kind = "staged"
    for_rdma = False
