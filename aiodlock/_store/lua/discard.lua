-- Deletes the lock, if it is ours: a release for the time in which a cluster moves the slot and
-- refuses scripts with several keys. It wakes nobody: waiters find the lock free when they poll.
--
-- KEYS  1 lock (string)
-- ARGV  1 owner token
--
-- Returns  {1 if the lock was ours else 0, value in the lock now or nil}

local value = redis.call('GET', KEYS[1])
if value and string.sub(value, 1, #ARGV[1] + 1) == ARGV[1] .. '/' then
  redis.call('DEL', KEYS[1])
  return {1, false}
end
return {0, value}
