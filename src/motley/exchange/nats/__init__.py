"""The log, the blobs and presence on a NATS server, and the server itself."""
