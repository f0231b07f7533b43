-- Makes each lock live at least ttl again, if exactly that grant of it still stands.
--
-- One key for each lock on purpose: while a cluster moves a slot, scripts with absent side keys are
-- refused. Several locks share a call only where all keys are on one server.
--
-- KEYS  1.. locks (strings)
-- ARGV  1 ttl, ms
--       2.. for each lock its value: owner token/fencing token
--
-- Returns  for each lock two items
--          ours      1, ms left
--          not ours  0, value in the lock or nil (or why it cannot be read); it was not changed

local ttl_ms = tonumber(ARGV[1])
local answers = {}
for n, lock in ipairs(KEYS) do
  -- By pcall: a key of the wrong type must not keep the other locks from living on.
  local value = redis.pcall('GET', lock)
  if value == ARGV[n + 1] then
    local left = redis.call('PTTL', lock)
    if left < ttl_ms then
      redis.call('PEXPIRE', lock, ARGV[1])
      left = ttl_ms
    end
    answers[2 * n - 1], answers[2 * n] = 1, left
  else
    answers[2 * n - 1], answers[2 * n] = 0, value
  end
end
return answers
