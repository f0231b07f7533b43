"""Where leases live: the only room that talks to a server."""
