-- Runs commands if a fencing token still stands; nothing comes between the check and them.
--
-- KEYS  1 fence (string "<fencing token>/<id of the claim>")
-- ARGV  1 fencing token
--       2 words of the first command, then these words; the same for each further command
--
-- Returns  {1, reply of each command}: all were run; an error ends the script, without undoing
--          {0, the stored token or nil}: nothing was run

local stored = redis.call('GET', KEYS[1])
local token = stored and string.match(stored, '^(%d+)/')
if token ~= ARGV[1] then
  return {0, token or false}
end
local replies = {}
local at = 2
-- Bounded by the number of words.
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  replies[#replies + 1] = redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
return {1, replies}
