"""Bytes to typed values and back. Total: any bytes give a value or a typed error."""
