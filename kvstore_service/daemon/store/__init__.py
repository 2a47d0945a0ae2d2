"""What calls do: workers, sessions, slots, prefixes, packs, indexes, operation. One file each, over `state`."""
