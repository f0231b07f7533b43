-- Gives an acquisition up, waiting or granted: it leaves the queue; its lock goes to the next.
--
-- KEYS  1 lock (string)   2 fence (string)   3 queue (zset)   4 alive (zset)
-- ARGV  1 owner token (or the whole value, for a lock that another library wrote)
--       2 1: leave a tombstone that refuses late copies of this acquisition for 60 s; 0: do not
--       3 what every inbox channel begins with
--       4 the caller's client id: its own waiters hear of a hand-off by this reply, not by message
--
-- Returns  {1, value in the lock now or nil}: it was ours
--          {2, the same}: it was free; where somebody waited, it is handed on
--          {0, value in the lock}: it is another's

-- A key of the wrong type must not keep us in the queue: the error is returned at the end.
local value = redis.pcall('GET', KEYS[1])
local wrong = type(value) == 'table' and value.err and value
local token = ARGV[1]
local ours = value and not wrong
  and (value == token or string.sub(value, 1, #token + 1) == token .. '/')

-- Nobody waits: the hot path.
if ARGV[2] == '0' and redis.call('EXISTS', KEYS[3], KEYS[4]) == 0 then
  if ours then
    redis.call('DEL', KEYS[1])
    return {1, false}
  end
  return wrong or {value and 0 or 2, value}
end

-- A side key of the wrong type must not keep the lock, either: nobody can be waiting there.
local last = redis.pcall('GET', KEYS[2])
for _, probe in ipairs({last, redis.pcall('ZSCORE', KEYS[3], token),
                        redis.pcall('ZSCORE', KEYS[4], token)}) do
  if type(probe) == 'table' and probe.err then
    if not ours then
      return probe
    end
    redis.call('DEL', KEYS[1])
    return {1, false}
  end
end

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

redis.call('ZREM', KEYS[3], token)
redis.call('ZREM', KEYS[4], token)
if ARGV[2] == '1' then
  redis.call('ZADD', KEYS[4], string.format('%.0f', now_ms + 60000), '!' .. token)
  if redis.call('PTTL', KEYS[4]) < 60000 then
    redis.call('PEXPIRE', KEYS[4], 60000)
  end
end
-- A free lock goes on to the hand-off: its head may be leaving, and the next one not know it.
if not ours and (value or wrong) then
  return wrong or {0, value}
end

-- The earliest live waiter; drops at most 1000 dead ones before it, beyond which the lock is left
-- free, and the next poll goes on.
for _ = 1, 1000 do
  local head = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if not head then
    break
  end
  local until_ms = math.min(
    tonumber(redis.call('ZSCORE', KEYS[4], head) or now_ms + 6000), now_ms + 6000)
  -- One who would share the name cannot be handed a lock: it enters when it polls.
  if until_ms > now_ms and string.match(head, ':%d+[rws]%d*$') then
    break
  end
  redis.call('ZREM', KEYS[3], head)
  redis.call('ZREM', KEYS[4], head)
  if until_ms > now_ms then
    local text = string.format('%.0f', math.max((tonumber(last or 0) or 0) + 1, now_us))
    redis.call('SET', KEYS[2], text, 'EX', 86400)
    value = head .. '/' .. text
    redis.call('SET', KEYS[1], value, 'PX', string.format('%.0f', until_ms - now_ms))
    local client_id = string.match(head, '^[^:]*:([^:]*)')
    if client_id ~= ARGV[4] then
      -- By pcall: a channel that we may not use must not undo the hand-off.
      redis.pcall('PUBLISH', ARGV[3] .. client_id, value .. ' ' .. KEYS[1])
    end
    return {ours and 1 or 2, value}
  end
end

redis.call('DEL', KEYS[1])
return {ours and 1 or 2, false}
