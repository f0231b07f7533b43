-- Gives an acquisition of a name that several may hold up, waiting or granted; of a writer, also
-- only its right to write. Waiters who may enter now do.
--
-- KEYS  1 lock (zset)   2 fence (string)   3 queue (zset)   4 alive (zset)   5 grants (zset); as in
--       share_acquire.lua
-- ARGV  1 owner token
--       2 1: leave a tombstone that refuses late copies of this acquisition for 60 s; 0: do not;
--         r: go on as a reader
--       3 what every inbox channel begins with
--       4 the caller's client id: its own waiters hear of a hand-off by this reply, not by message
--
-- Returns  {1 if it was ours (r: is ours) else 0, then for each of the caller's waiters who entered
--           its owner token/fencing token}

local token, inboxes, own_client_id = ARGV[1], ARGV[3], ARGV[4]

-- Nobody waits: the hot path.
if ARGV[2] == '0' and redis.call('EXISTS', KEYS[3], KEYS[4]) == 0 then
  local removed = redis.call('ZREM', KEYS[1], token)
  redis.pcall('ZREM', KEYS[5], token, '+' .. token)
  return {removed}
end

-- A key of the wrong type must not keep us in the queue.
local end_ms = redis.pcall('ZSCORE', KEYS[1], token)
local was_ours = type(end_ms) == 'string' and 1 or 0

-- A side key of the wrong type must not keep the lock, either: nobody can be waiting there.
local last = redis.pcall('GET', KEYS[2])
local granted = redis.pcall('ZSCORE', KEYS[5], token)
for _, probe in ipairs({last, granted, redis.pcall('ZSCORE', KEYS[3], token),
                        redis.pcall('ZSCORE', KEYS[4], token)}) do
  if type(probe) == 'table' and probe.err then
    if was_ours == 0 or ARGV[2] == 'r' then
      return probe
    end
    redis.call('ZREM', KEYS[1], token)
    redis.pcall('ZREM', KEYS[5], token, '+' .. token)
    return {1}
  end
end
last = tonumber(last or 0) or 0

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
-- From here on a lock of the wrong type is an error: we are out of the queue.
if ARGV[2] ~= 'r' then
  redis.call('ZREM', KEYS[1], token)
  redis.call('ZREM', KEYS[5], token, '+' .. token)
elseif granted and was_ours == 1 and tonumber(end_ms) > now_ms then
  redis.call('ZADD', KEYS[5], 0, '+' .. token)
else
  was_ours = 0
end
local ttl_ms, reads = nil, false  -- Nobody polls here.

-- What follows, up to the next such line, is the same in share_acquire.lua.
-- ---------------------------------------------------------------------------------------------

-- What holds no owner tokens is not ours to purge.
local one = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
if one and not string.match(one, ':%d+[rws]%d*$') then
  return redis.error_reply('WRONGTYPE The key holds something else')
end

-- Holders whose life is over, at most 1000.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZREM', KEYS[5], member, '+' .. member)
end

local is_semaphore = string.match(token, ':%d+s%d+$') ~= nil

-- How many holders it bears, itself included; 0: it has no place among holders of our kind.
local function limit_of(member)
  local kind, permits = string.match(member, ':%d+([rws])(%d*)$')
  if not kind or (kind == 's') ~= is_semaphore then
    return 0
  end
  if kind == 's' then
    return tonumber(permits) or 0
  end
  if kind == 'r' or (reads and member == token) or redis.call('ZSCORE', KEYS[5], '+' .. member) then
    return math.huge
  end
  return 1
end

-- Of readers and writers the first one tells for all: a writer is alone.
local holders = redis.call('ZRANGE', KEYS[1], 0, is_semaphore and -1 or 0)
local inside, most = redis.call('ZCARD', KEYS[1]), math.huge
for _, holder in ipairs(holders) do
  most = math.min(most, limit_of(holder))
end
if inside == 0 then
  redis.call('DEL', KEYS[5])  -- What an evicted lock left.
end

local function may_enter(member)
  return inside < math.min(most, limit_of(member))
end

local longest_ms = 0

local function enter(member, life_ms)
  last = math.max(last + 1, now_us)
  local text = string.format('%.0f', last)
  redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + life_ms), member)
  redis.call('ZADD', KEYS[5], text, member)
  if reads and member == token then
    redis.call('ZADD', KEYS[5], 0, '+' .. member)
  end
  redis.call('ZREM', KEYS[3], member)
  redis.call('ZREM', KEYS[4], member)
  inside, most = inside + 1, math.min(most, limit_of(member))
  longest_ms = math.max(longest_ms, life_ms)
  return text
end

local function set_liveness(member, until_ms)
  redis.call('ZADD', KEYS[4], string.format('%.0f', until_ms), member)
  if redis.call('PTTL', KEYS[4]) < 12000 then  -- A tombstone may need it for longer.
    redis.call('PEXPIRE', KEYS[4], 12000)
  end
end

-- Until when it counts as live. More than 6000 ms ahead was written before the clock stepped back.
local function liveness_of(member)
  local until_ms = tonumber(redis.call('ZSCORE', KEYS[4], member) or now_ms + 6001)
  if until_ms > now_ms + 6000 then
    until_ms = now_ms + 6000
    set_liveness(member, until_ms)
  end
  return until_ms
end

-- The waiters who may enter, by arrival: only the head may, so that nobody is overtaken. At most
-- 1000 are let in or, being dead, dropped; the next call goes on. Those of our own client (values
-- in `told`) hear by the reply, the others by message. Returns whether nobody is left in the queue.
local told, own_text = {}, nil

local function let_in()
  for _ = 1, 1000 do
    local head = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    local until_ms = head and liveness_of(head)
    -- A holder in the queue (after a failover) has what it waits for, for longer perhaps.
    if head and (until_ms <= now_ms or redis.call('ZSCORE', KEYS[1], head)) then
      redis.call('ZREM', KEYS[3], head)
      redis.call('ZREM', KEYS[4], head)
    elseif not head or not may_enter(head) then
      return not head
    elseif head == token then
      own_text = enter(token, ttl_ms)
    else
      local value = head .. '/' .. enter(head, until_ms - now_ms)
      local client_id = string.match(head, '^[^:]*:([^:]*)')
      if client_id == own_client_id then
        told[#told + 1] = value
      else
        -- By pcall: a channel that we may not use must not undo a hand-off.
        redis.pcall('PUBLISH', inboxes .. client_id, value .. ' ' .. KEYS[1])
      end
    end
  end
end

-- Grants are done with: their last number is kept, and both keys live as long as the longest of
-- them, never shorter than they did.
local function note_grants()
  if longest_ms == 0 then
    return
  end
  redis.call('SET', KEYS[2], string.format('%.0f', last), 'EX', 86400)
  for _, key in ipairs({KEYS[1], KEYS[5]}) do
    if redis.call('PTTL', key) < longest_ms then
      redis.call('PEXPIRE', key, string.format('%.0f', longest_ms))
    end
  end
end

-- ---------------------------------------------------------------------------------------------

let_in()
note_grants()
table.insert(told, 1, was_ours)
return told
