"""One folder per agent framework, each with an app and a rollout collector."""
