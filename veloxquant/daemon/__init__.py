"""The long-running planner: the only place with threads, signals and locks."""
