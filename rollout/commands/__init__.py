"""The commands: each parses its options, calls one function, and prints."""
