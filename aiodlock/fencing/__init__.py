"""Storage that refuses a holder who was paused: claims by fencing token, in SQL or Redis.

Before its first read a section of work *claims* its lock's name with its fencing token. A claim
whose token is not larger than the stored one is refused, so whoever comes late learns it. All that
the section does later demands that its own token still stands. Imports no database library.
"""

from ._grant import Grant, StaleFenceError
from ._redis import RedisFence
from ._sql import SqlFence

__all__ = ["Grant", "RedisFence", "SqlFence", "StaleFenceError"]
