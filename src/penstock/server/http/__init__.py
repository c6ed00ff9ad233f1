"""HTTP: routes, connections, and the pages that describe a server."""
