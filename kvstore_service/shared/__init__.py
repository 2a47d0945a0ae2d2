"""What daemon and client share: nouns, messages, memory, settings."""
