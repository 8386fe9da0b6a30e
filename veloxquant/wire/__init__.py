"""Bytes to typed values and back: frames, messages, error codes. Total: any bytes give a value or a typed error."""
