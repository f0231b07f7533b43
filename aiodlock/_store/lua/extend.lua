-- Makes the lock live at least ttl again, if exactly this grant still stands.
--
-- One key on purpose: while a cluster moves a slot, scripts with absent side keys are refused.
--
-- KEYS  1 lock (string)
-- ARGV  1 value: owner token/fencing token
--       2 ttl, ms
--
-- Returns  ours      {1, ms left}
--          not ours  {0, value in the lock or nil}; nothing was changed

local value = redis.call('GET', KEYS[1])
if value ~= ARGV[1] then
  return {0, value}
end
local left = redis.call('PTTL', KEYS[1])
if left >= tonumber(ARGV[2]) then
  return {1, left}
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {1, tonumber(ARGV[2])}
