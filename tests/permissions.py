"""What a user of the server must be allowed so that locks work: the least, as rules of the ACL."""

from __future__ import annotations

from typing import Final

# For the prefix "aiodlock:"; with another one the two patterns change, and nothing else.
LEAST_PERMISSIONS: Final = (
    "~aiodlock:*",
    "&aiodlock:*",
    *("+evalsha", "+eval"),
    *("+get", "+set", "+del", "+exists", "+pttl", "+expire", "+pexpire", "+time"),
    *("+zadd", "+zcard", "+zrange", "+zrangebyscore", "+zrank", "+zrem", "+zscore"),
    *("+publish", "+subscribe"),
)

# What redis-py needs besides, to find its way in a cluster.
CLUSTER_PERMISSIONS: Final = ("+cluster|slots", "+command")
