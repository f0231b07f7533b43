-- One idempotent poll of one acquisition: takes the lock, or queues for it, or keeps its place.
--
-- KEYS  1 lock (string)   2 fence (string)   3 queue (zset)   4 alive (zset)
-- ARGV  1 owner token
--       2 ttl of the lock, ms
--       3 alive, ms: how long the caller counts as a live waiter after this poll; 0: do not queue
--       4 what every inbox channel begins with
--
-- Returns  granted     {1, fencing token, ms left, 1 if it was ours before this poll else 0}
--          refused     {0, value in the lock or "", its ms left (-1: no TTL), the caller's place
--                       in the queue (0 = head, -1 = not in it), waiters, last fencing token
--                       (TIME in us where the fence key is gone)}
--          tombstoned  {-1}: this acquisition was given up
--          an error    WRONGTYPE: several may hold the name, and somebody waits for it so

-- Free and alone: the hot path. (The fence key lives a day, 86400 s.)
if redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4]) == 0 then
  local time = redis.call('TIME')
  local fencing_token = time[1] * 1000000 + time[2]
  local text = string.format('%.0f', fencing_token)
  local last = tonumber(redis.call('SET', KEYS[2], text, 'EX', 86400, 'GET') or 0) or 0
  if last >= fencing_token then
    fencing_token = last + 1
    text = string.format('%.0f', fencing_token)
    redis.call('SET', KEYS[2], text, 'EX', 86400)
  end
  redis.call('SET', KEYS[1], ARGV[1] .. '/' .. text, 'PX', ARGV[2])
  return {1, fencing_token, tonumber(ARGV[2]), 0}
end

local token, ttl_ms, alive_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

if redis.call('ZSCORE', KEYS[4], '!' .. token) then
  return {-1}
end

local value = redis.call('GET', KEYS[1])

if value and string.sub(value, 1, #token + 1) == token .. '/' then
  redis.call('ZREM', KEYS[3], token)
  redis.call('ZREM', KEYS[4], token)
  local left = redis.call('PTTL', KEYS[1])
  if left < ttl_ms then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    left = ttl_ms
  end
  return {1, tonumber(string.sub(value, #token + 2)), left, 1}
end

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

-- Every key is looked at before any is written: one of another type must not stop us half-way.
local place = redis.call('ZSCORE', KEYS[3], token)
local last = tonumber(redis.call('GET', KEYS[2]) or 0) or 0

local function next_fencing_token()
  last = math.max(last + 1, now_us)
  local text = string.format('%.0f', last)
  redis.call('SET', KEYS[2], text, 'EX', 86400)
  return text
end

local function set_liveness(member, until_ms)
  redis.call('ZADD', KEYS[4], string.format('%.0f', until_ms), member)
end

-- The earliest live waiter with the end of its liveness, ms; drops at most 1000 dead ones before
-- it. A liveness more than 6000 ms ahead was written before the clock stepped back.
local function live_head()
  for n = 0, 1000 do
    local head = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
    if not head then
      return nil
    end
    local until_ms = tonumber(redis.call('ZSCORE', KEYS[4], head) or now_ms + 6001)
    if until_ms > now_ms + 6000 then
      until_ms = now_ms + 6000
      set_liveness(head, until_ms)
    end
    if until_ms > now_ms or n == 1000 then
      return head, until_ms
    end
    redis.call('ZREM', KEYS[3], head)
    redis.call('ZREM', KEYS[4], head)
  end
end

-- Entries of `alive` whose time is over and that stand for no waiter: old tombstones, and what an
-- evicted queue left. A dead waiter further back keeps its place: it may only be slow.
local function purge()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now_ms, 'LIMIT', 0, 1000)) do
    if not redis.call('ZSCORE', KEYS[3], member) then
      redis.call('ZREM', KEYS[4], member)
    end
  end
end

-- Whoever wrote to `alive`, and never shorter: a tombstone may need it for longer.
local function keep_livenesses()
  if redis.call('PTTL', KEYS[4]) < 12000 then
    redis.call('PEXPIRE', KEYS[4], 12000)
  end
end

-- My liveness comes first: a live waiter must not drop itself.
if alive_ms > 0 then
  set_liveness(token, now_ms + alive_ms)
end
local head, head_until_ms = live_head()
purge()

if not value then
  if not head or head == token then
    redis.call('ZREM', KEYS[3], token)
    redis.call('ZREM', KEYS[4], token)
    local text = next_fencing_token()
    redis.call('SET', KEYS[1], token .. '/' .. text, 'PX', ARGV[2])
    return {1, tonumber(text), ttl_ms, 0}
  end
  if string.match(head, ':%d+[rws]%d*$') then
    redis.call('ZREM', KEYS[4], token)
    keep_livenesses()
    return redis.error_reply('WRONGTYPE The name is locked as something else')
  end
  -- Free, but not mine to take: hand it to the head, who may not know yet.
  value = head .. '/' .. next_fencing_token()
  redis.call('SET', KEYS[1], value, 'PX', math.max(1, head_until_ms - now_ms))
  redis.call('ZREM', KEYS[3], head)
  redis.call('ZREM', KEYS[4], head)
  redis.pcall('PUBLISH', ARGV[4] .. string.match(head, '^[^:]*:([^:]*)'), value .. ' ' .. KEYS[1])
end

if alive_ms > 0 then
  if not place then
    local highest = tonumber(redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2] or 0)
    redis.call('ZADD', KEYS[3], string.format('%.0f', math.max(highest + 1, now_us)), token)
  end
  redis.call('EXPIRE', KEYS[3], 12)
end
keep_livenesses()

return {
  0,
  value,
  redis.call('PTTL', KEYS[1]),
  redis.call('ZRANK', KEYS[3], token) or -1,
  redis.call('ZCARD', KEYS[3]),
  last > 0 and last or now_us,
}
