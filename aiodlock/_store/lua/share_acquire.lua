-- One idempotent poll of one acquisition of a name that several may hold: enters, or queues for it,
-- or keeps its place.
--
-- An owner token ends with what it asks for: r to read, w to write, s<permits> a permit. Each asks
-- for a limit to the number of holders (r: none, w: 1), and may enter when that limit, with those of
-- all holders, leaves room for one more.
--
-- KEYS  1 lock (zset: owner token, end of its life in ms)   2 fence (string)   3 queue (zset)
--       4 alive (zset)   5 grants (zset: owner token, fencing token; "+" with the owner token of a
--       writer that reads now)
-- ARGV  1 owner token
--       2 ttl, ms
--       3 alive, ms: how long the caller counts as a live waiter after this poll; 0: do not queue
--       4 what every inbox channel begins with
--       5 r, if it is there: a writer that only reads from now on
--
-- Returns  granted     {1, fencing token, ms left, 1 if it was ours before this poll else 0}
--          refused     {0, token/fencing token of the holder that ends first or "", its ms left, the
--                       caller's place in the queue (0 = head, -1 = not in it), waiters, last
--                       fencing token (TIME in us where the fence key is gone)}
--          tombstoned  {-1}: this acquisition was given up
--          an error    WRONGTYPE: the name is locked as something else

-- Free and alone: the hot path. (The fence key lives a day, 86400 s.)
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4], KEYS[5]) == 0 then
  local time = redis.call('TIME')
  local fencing_token = time[1] * 1000000 + time[2]
  local end_ms = math.floor(fencing_token / 1000) + ARGV[2]
  local text = string.format('%.0f', fencing_token)
  local last = tonumber(redis.call('SET', KEYS[2], text, 'EX', 86400, 'GET') or 0) or 0
  if last >= fencing_token then
    fencing_token = last + 1
    text = string.format('%.0f', fencing_token)
    redis.call('SET', KEYS[2], text, 'EX', 86400)
  end
  redis.call('ZADD', KEYS[1], string.format('%.0f', end_ms), ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('ZADD', KEYS[5], text, ARGV[1])
  if ARGV[5] then
    redis.call('ZADD', KEYS[5], 0, '+' .. ARGV[1])
  end
  redis.call('PEXPIRE', KEYS[5], ARGV[2])
  return {1, fencing_token, tonumber(ARGV[2]), 0}
end

local token, ttl_ms, alive_ms, inboxes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local reads = ARGV[5] == 'r'
local own_client_id = nil

-- Every key is looked at before any is written: one of another type must not stop us half-way.
if redis.call('ZSCORE', KEYS[4], '!' .. token) then
  return {-1}
end
local end_ms = redis.call('ZSCORE', KEYS[1], token)
local granted = redis.call('ZSCORE', KEYS[5], token)
local place = redis.call('ZSCORE', KEYS[3], token)
local last = tonumber(redis.call('GET', KEYS[2]) or 0) or 0

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

if end_ms and granted and tonumber(end_ms) > now_ms then
  redis.call('ZREM', KEYS[3], token)
  redis.call('ZREM', KEYS[4], token)
  local left = end_ms - now_ms
  if left < ttl_ms then
    left = ttl_ms
    redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ttl_ms), token)
    for _, key in ipairs({KEYS[1], KEYS[5]}) do
      if redis.call('PTTL', key) < ttl_ms then
        redis.call('PEXPIRE', key, ARGV[2])
      end
    end
  end
  return {1, tonumber(granted), left, 1}
end
if end_ms and not granted then
  redis.call('ZREM', KEYS[1], token)  -- The grants were evicted: it cannot be told which one it was.
end

-- What follows, up to the next such line, is the same in share_release.lua.
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

local function of_another_kind()
  return redis.error_reply('WRONGTYPE The name is locked as something else')
end

if most == 0 then
  return of_another_kind()
end

-- My liveness comes first: a live waiter must not drop itself.
if place and alive_ms > 0 then
  set_liveness(token, now_ms + alive_ms)
end
local is_empty = let_in()
if is_empty and not own_text and may_enter(token) then
  own_text = enter(token, ttl_ms)
end
note_grants()
-- Not before: whoever is dead stands for no kind.
local first = not is_empty and redis.call('ZRANGE', KEYS[3], 0, 0)[1]
if first and not own_text and limit_of(first) == 0 then
  return of_another_kind()
end

-- Entries of `alive` whose time is over and that stand for no waiter: old tombstones, and what an
-- evicted queue left. A dead waiter further back keeps its place: it may only be slow.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now_ms, 'LIMIT', 0, 1000)) do
  if not redis.call('ZSCORE', KEYS[3], member) then
    redis.call('ZREM', KEYS[4], member)
  end
end

if own_text then
  return {1, tonumber(own_text), ttl_ms, 0}
end

if alive_ms > 0 then
  if not place then
    set_liveness(token, now_ms + alive_ms)
    local highest = tonumber(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2] or 0)
    redis.call('ZADD', KEYS[3], string.format('%.0f', math.max(highest + 1, now_us)), token)
  end
  redis.call('EXPIRE', KEYS[3], 12)
end

local holder = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {
  0,
  holder[1] and holder[1] .. '/' .. (redis.call('ZSCORE', KEYS[5], holder[1]) or 0) or '',
  holder[1] and holder[2] - now_ms or 0,
  redis.call('ZRANK', KEYS[3], token) or -1,
  redis.call('ZCARD', KEYS[3]),
  last > 0 and last or now_us,
}
