"""Templates of the background agent: a property list for launchd, units for systemd. README.md is their page."""
