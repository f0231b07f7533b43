-- On a node of a quorum: makes one holder live at least ttl again, if it is there, and gives it the
-- fencing token that the quorum agreed on, as confirm.lua does for a lock.
--
-- KEYS  1 lock (zset)   2 fence (string)   3 grants (zset)
-- ARGV  1 owner token
--       2 ttl, ms
--       3 fencing token; 0: leave the node's own (a quorum without fencing)
--       4 1: a writer that only reads from now on; 0: as it was
--
-- Returns  ours      {1, ms left}
--          not ours  {0}; its grant, if that was left, is gone too

local end_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
local granted = redis.call('ZSCORE', KEYS[3], ARGV[1])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if not end_ms or tonumber(end_ms) <= now_ms or not granted then
  redis.call('ZREM', KEYS[3], ARGV[1], '+' .. ARGV[1])  -- No release will ask for it here.
  return {0}
end

-- A server without memory for more refuses what follows, unless a script has begun to write.
redis.call('ZREM', KEYS[1], '')
if ARGV[3] ~= '0' then
  -- The fence key lives a day, 86400 s; a larger number in it stays.
  if (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) < tonumber(ARGV[3]) then
    redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)
  end
  if tonumber(granted) ~= tonumber(ARGV[3]) then
    redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
  end
end
if ARGV[4] == '1' then
  redis.call('ZADD', KEYS[3], 0, '+' .. ARGV[1])
end

local left, ttl_ms = end_ms - now_ms, tonumber(ARGV[2])
if left < ttl_ms then
  left = ttl_ms
  redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ttl_ms), ARGV[1])
  for _, key in ipairs({KEYS[1], KEYS[3]}) do
    if redis.call('PTTL', key) < ttl_ms then
      redis.call('PEXPIRE', key, ARGV[2])
    end
  end
end
return {1, left}
