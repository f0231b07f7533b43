-- Makes one holder live at least ttl again, if exactly that grant of it still stands.
--
-- KEYS  1 lock (zset)   2 grants (zset)
-- ARGV  1 owner token
--       2 ttl, ms
--       3 fencing token
--
-- Returns  ours      {1, ms left}
--          not ours  {0}; nothing was changed

local end_ms = redis.call('ZSCORE', KEYS[1], ARGV[1])
local granted = redis.call('ZSCORE', KEYS[2], ARGV[1])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

if not end_ms or tonumber(end_ms) <= now_ms
  or not granted or tonumber(granted) ~= tonumber(ARGV[3]) then
  return {0}
end

local left, ttl_ms = end_ms - now_ms, tonumber(ARGV[2])
if left < ttl_ms then
  left = ttl_ms
  -- A server without memory for more refuses ZADD, unless a script has begun to write.
  redis.call('ZREM', KEYS[1], '')
  redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ttl_ms), ARGV[1])
  for _, key in ipairs(KEYS) do
    if redis.call('PTTL', key) < ttl_ms then
      redis.call('PEXPIRE', key, ARGV[2])
    end
  end
end
return {1, left}
