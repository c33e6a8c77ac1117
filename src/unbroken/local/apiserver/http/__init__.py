"""HTTP of the API server: requests, answers, streams, discovery, OpenAPI."""
