-- What stands under a name; changes nothing.
--
-- KEYS  1 lock (string)   2 queue (zset)
-- ARGV  none
--
-- Returns  {value in the lock or nil, its ms left (-1: no TTL, -2: no key), waiters}

return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), redis.call('ZCARD', KEYS[2])}
