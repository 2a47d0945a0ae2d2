"""Who stores what: packs and bytes of each user, and its longest text. Changes nothing.

python examples/inventory.py [SOCKET BROKER]
"""

import sys
from collections import Counter

from kvstore_service.client import AdminClient, StoreError


def main() -> int:
    with AdminClient.connect(*sys.argv[1:3]) as admin:
        packs: Counter[str] = Counter()
        longest: Counter[str] = Counter()
        for pack in admin.list_packs():
            packs[pack.tenant] += 1
            longest[pack.tenant] = max(longest[pack.tenant], pack.first_token + pack.tokens)
        for quota in admin.list_quotas():
            bound = f"{quota.nvme_bytes:,} B" if quota.nvme_bytes else "no quota"
            print(
                f"{quota.tenant}: {packs[quota.tenant]} packs, {quota.stored_bytes:,} B of {bound}, "
                f"longest text {longest[quota.tenant]} tokens"
            )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StoreError as error:
        sys.exit(f"inventory: {error.message}")
