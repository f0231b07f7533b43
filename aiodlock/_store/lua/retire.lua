-- Gives a lease up, but lets its name stay taken for a while: by nobody, for whom nothing can be
-- asked any more, so that a repeated or late copy of this or of any request changes nothing.
--
-- It hands nothing over and leaves the queue as it is: waiters find the lock free when they poll.
--
-- KEYS  1 lock (string)   2 alive (zset), or not there: leave a tombstone that refuses late copies
--       of this acquisition for 60 s
-- ARGV  1 owner token
--       2 what stands there in its place from now on
--       3 how long from now on, ms: the life of the lock becomes shorter or longer
--
-- Returns  {1, nil}: it was ours
--          {2, nil}: it is free
--          {0, value in the lock}: it is another's, or nobody's already; it was not changed

-- A key of the wrong type must not keep the tombstone away: the error is returned at the end.
local value = redis.pcall('GET', KEYS[1])
local token = ARGV[1] .. '/'

if KEYS[2] then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  redis.pcall('ZADD', KEYS[2], string.format('%.0f', now_ms + 60000), '!' .. ARGV[1])
  if redis.call('PTTL', KEYS[2]) < 60000 then
    redis.call('PEXPIRE', KEYS[2], 60000)
  end
end

if type(value) == 'table' and value.err then
  return value
end
if not value then
  return {2, false}
end
if string.sub(value, 1, #token) ~= token then
  return {0, value}
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
-- By pcall: a server without memory for more refuses any SET, but its life is right all the same.
redis.pcall('SET', KEYS[1], ARGV[2] .. string.sub(value, #token), 'KEEPTTL')
return {1, false}
