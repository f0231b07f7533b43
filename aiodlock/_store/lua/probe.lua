-- Does whatever the other scripts do, to a key that nobody uses, without effect: who may not do
-- all of it must not get a lock that it cannot extend, hand on or release.
--
-- KEYS  1 a key beside the lock
-- ARGV  1 the caller's own inbox
--
-- Returns  {why publishing is refused, or ""}; any other refusal is an error

redis.call('TIME')
redis.call('EXISTS', KEYS[1])
redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], '', 'XX', 'GET')
redis.call('PTTL', KEYS[1])
redis.call('EXPIRE', KEYS[1], 12)
redis.call('PEXPIRE', KEYS[1], 12000)
redis.call('DEL', KEYS[1])
redis.call('ZADD', KEYS[1], 'XX', 0, '')
redis.call('ZREM', KEYS[1], '')
redis.call('ZSCORE', KEYS[1], '')
redis.call('ZRANK', KEYS[1], '')
redis.call('ZRANGE', KEYS[1], 0, 0)
redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
redis.call('ZCARD', KEYS[1])

local published = redis.pcall('PUBLISH', ARGV[1], '')
return {type(published) == 'table' and published.err or ''}
