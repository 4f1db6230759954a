"""The OpenAI Agents SDK: the app that makes its models, and the hooks that collect its turns."""
