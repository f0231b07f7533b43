-- Claims a name for ever, or for a time, if nobody has.
--
-- KEYS  1 once (string: id of the claim)
-- ARGV  1 id of this claim, so that a copy sent again after a lost reply gets the same answer
--       2 ms for which the claim stands; 0: for ever
--
-- Returns  1: claimed by this   0: claimed before

local stored = redis.call('GET', KEYS[1])
if stored then
  return stored == ARGV[1] and 1 or 0
end
if ARGV[2] == '0' then
  redis.call('SET', KEYS[1], ARGV[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
