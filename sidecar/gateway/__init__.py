"""The daemon's doors for everyone who does not speak our socket's protocol: gRPC and HTTP, with Gubernator's V1 API."""
