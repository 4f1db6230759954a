"""The durable part of the project: messages, store, queue, limits, services, trainer client."""
