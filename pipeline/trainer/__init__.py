"""The trainer's side: lease, commit and replay of complete groups."""
