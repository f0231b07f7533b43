-- Deletes one holder: a release for the time in which a cluster moves the slot and refuses scripts
-- with several keys. It wakes nobody: waiters find that there is room when they poll.
--
-- KEYS  1 lock (zset)
-- ARGV  1 owner token
--
-- Returns  {1 if it was ours else 0}

return {redis.call('ZREM', KEYS[1], ARGV[1])}
