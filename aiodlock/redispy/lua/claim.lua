-- Takes a lock that is free, or was taken by an earlier copy of this very request.
--
-- KEYS  1 lock (string: a token)
-- ARGV  1 claim: what stands in the key; of this acquisition alone
--       2 ms that it lives from now
--
-- Returns  {1, ms left}: ours
--          {0, ms left}: another's; -1: its key has no expiry

if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return {1, tonumber(ARGV[2])}
end
-- What is no string is a lock that is held, as SET NX says too.
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, tonumber(ARGV[2])}
end
return {0, redis.call('PTTL', KEYS[1])}
