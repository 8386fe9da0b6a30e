"""First-party methods, one file each."""
