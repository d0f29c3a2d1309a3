"""Who vouches for a record: ed25519 signatures, publishers, revocations."""
