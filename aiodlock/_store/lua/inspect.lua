-- What stands under a name; changes nothing.
--
-- KEYS  1 lock (string)   2 queue (zset)
--
-- Returns  {value in the lock or "", its ms left (-1: no TTL, -2: no key), waiters}

return {redis.call('GET', KEYS[1]) or '', redis.call('PTTL', KEYS[1]), redis.call('ZCARD', KEYS[2])}
