"""A window in a GPU's memory, which the daemon stores to through GDRCopy."""

from decode_worker.window.imported import ImportedWindow


class GdrWindow(ImportedWindow):
    kind = "gdr"
    for_rdma = True
