"""The durable middle: contract, store, queue, services, trainer client and command line."""
