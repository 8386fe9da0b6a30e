"""This machine: sources read, chips parsed, one HardwareProfile out. Never raises."""
