-- Who stands under a name that several may hold; changes nothing.
--
-- KEYS  1 lock (zset)   2 queue (zset)   3 grants (zset)
-- ARGV  none
--
-- Returns  {waiters, then for each holder, at most 1000, the first to end first:
--           owner token/fencing token, ms left, 1 if it is a writer that only reads now else 0}

local one = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
if one and not string.match(one, ':%d+[rws]%d*$') then
  return redis.error_reply('WRONGTYPE The key holds something else')
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local from = string.format('(%.0f', now_ms)
local found = redis.call(
  'ZRANGEBYSCORE', KEYS[1], from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1000)
local answer = {redis.call('ZCARD', KEYS[2])}
for n = 1, #found, 2 do
  local member = found[n]
  answer[#answer + 1] = member .. '/' .. (redis.call('ZSCORE', KEYS[3], member) or 0)
  answer[#answer + 1] = found[n + 1] - now_ms
  answer[#answer + 1] = redis.call('ZSCORE', KEYS[3], '+' .. member) and 1 or 0
end
return answer
