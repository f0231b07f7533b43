-- On a node of a quorum: makes the lock live at least ttl again, if it is ours, and gives it the
-- fencing token that the quorum agreed on. What the node itself made is not enough: the largest
-- counter of a majority may be smaller than one that an earlier majority had.
--
-- KEYS  1 lock (string)   2 fence (string)
-- ARGV  1 owner token
--       2 ttl, ms
--       3 fencing token; 0: leave the node's own (a quorum without fencing)
--
-- Returns  ours      {1, ms left}
--          not ours  {0, value in the lock or nil}; nothing was changed

local value = redis.call('GET', KEYS[1])
local token = ARGV[1] .. '/'
if not value or string.sub(value, 1, #token) ~= token then
  return {0, value}
end

-- Written where something changes only: a server without memory for more refuses any SET.
if ARGV[3] ~= '0' then
  -- The fence key lives a day, 86400 s; a larger number in it stays.
  if (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) < tonumber(ARGV[3]) then
    redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)
  end
  if value ~= token .. ARGV[3] then
    redis.call('SET', KEYS[1], token .. ARGV[3], 'KEEPTTL')
  end
end
local left = redis.call('PTTL', KEYS[1])
if left < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  left = tonumber(ARGV[2])
end
return {1, left}
