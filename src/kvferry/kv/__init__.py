"""KV caches: reading and building them, rotation, dumps on disk, the mapper and the hand-off."""
