"""Free the disk tier: evict the oldest packs that nobody uses until it is at most half full.

python examples/admin_client.py [SOCKET BROKER]
"""

import sys

from kvstore_service.client import AdminClient, StoreError


def main() -> int:
    with AdminClient.connect(*sys.argv[1:3]) as admin:
        status = admin.get_status()
        stored = status.counters["stored_bytes"]
        print(f"{status.packs} packs, {stored:,} of {status.nvme_bytes:,} B, {status.sessions} sessions")
        idle = [pack for pack in admin.list_packs() if not (pack.references or pack.pinned)]
        for pack in sorted(idle, key=lambda pack: pack.created_s):
            if stored <= status.nvme_bytes // 2:
                break
            for gone in admin.evict([pack.pack_id], descendants=True):
                print(gone.pack_id.hex()[:16], gone.message or f"{gone.freed_bytes:,} B freed")
                stored -= gone.freed_bytes
        failed = [check for check in admin.audit() if not check.ok]
        for check in failed:
            print(f"audit: {check.name}: {check.detail}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoreError as error:
        sys.exit(f"admin_client: {error.message}")
