"""What is durable: the catalogue, sidecars, and packs that are open."""
