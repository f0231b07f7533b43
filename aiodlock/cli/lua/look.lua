-- What stands under a name, of whatever kind it is; changes nothing.
--
-- KEYS  1 lock   2 fence   3 queue   4 alive   5 grants
-- ARGV  1 how many holders, and how many waiters, are told at most
--       2 how many bytes of a value are told at most
--
-- Returns  1 TIME in us
--          2 what the lock's key is: "none", "string", "zset" or another type
--          3 its value, if it is a string      4 the length of that      5 its ms left (-1: no TTL)
--          6 the last fencing token, or nil
--          7 how many holders, if it is a sorted set
--          8 of each, the first to end first: {owner token, its ms left, fencing token or nil,
--            1 if it is a writer that only reads now else 0}; where nobody's life is left, of the
--            first one all the same: whether it is a holder at all
--          9 how many waiters
--         10 of each, the first to come first: {owner token, when it came in us, until when it counts
--            as alive in ms or nil}

local most, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])

-- The reply, or false where the key is of another type; any other error is the script's.
local function read(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then
      redis.call(...)
    end
    return false
  end
  return reply
end

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now_ms = math.floor(now_us / 1000)

local is = 'none'
local value, length = false, 0
local holders, inside = {}, 0

if redis.call('EXISTS', KEYS[1]) == 1 then
  value = read('GET', KEYS[1])
  local from = string.format('(%.0f', now_ms)
  local found = not value and read('ZRANGEBYSCORE', KEYS[1], from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  if value then
    is, length = 'string', #value
    value = string.sub(value, 1, bytes)
  elseif found then
    is, inside = 'zset', #found / 2
    if inside == most then
      inside = redis.call('ZCARD', KEYS[1])
    elseif inside == 0 then
      found = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    end
    for n = 1, #found, 2 do
      local member = found[n]
      holders[#holders + 1] = {
        member,
        found[n + 1] - now_ms,
        read('ZSCORE', KEYS[5], member),
        read('ZSCORE', KEYS[5], '+' .. member) and 1 or 0,
      }
    end
  else
    -- By pcall: to know the type is not worth a permission.
    local reply = redis.pcall('TYPE', KEYS[1])
    is = reply.ok or 'unknown type'
  end
end

local waiters = {}
local queue = read('ZRANGE', KEYS[3], 0, most - 1, 'WITHSCORES') or {}
for n = 1, #queue, 2 do
  waiters[#waiters + 1] = {queue[n], tonumber(queue[n + 1]), read('ZSCORE', KEYS[4], queue[n])}
end

return {
  now_us,
  is,
  value,
  length,
  redis.call('PTTL', KEYS[1]),
  read('GET', KEYS[2]),
  inside,
  holders,
  read('ZCARD', KEYS[3]) or 0,
  waiters,
}
