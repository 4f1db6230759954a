"""The offline policy: a stand-in server that answers like a model from rules."""
