"""Where leases live: the only room that talks to a server.

Read `_redis` (what is asked), `_extensions` (what is asked together), `_calls` (over which
connection), `_mux` (many callers, one connection), `_wire` (bytes).
"""
