"""Pure values shared by every process: states, messages, errors.

Imports the standard library, pydantic, orjson and zstandard only.
"""
