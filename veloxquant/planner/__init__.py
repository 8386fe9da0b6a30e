"""Pure planning: request and snapshot in, plan out. No I/O, no clock."""
