-- Gives a claimed lock the token and the expiry that were asked for.
--
-- KEYS  1 lock (string: a token)
-- ARGV  1 claim
--       2 token
--       3 ms that it lives from now; nothing: for ever
--
-- Returns  1: done, also if an earlier copy of this request did it
--          2: the token stands there; an earlier copy wrote it, if the claim has not expired since
--          0: the claim is gone

local value = redis.pcall('GET', KEYS[1])
if value == ARGV[1] then
  if ARGV[3] == '' then
    redis.call('SET', KEYS[1], ARGV[2])
  else
    redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  end
  return 1
end
return value == ARGV[2] and 2 or 0
