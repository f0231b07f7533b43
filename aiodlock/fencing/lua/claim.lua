-- Claims a name with a fencing token that is larger than the stored one.
--
-- KEYS  1 fence (string "<fencing token>/<id of the claim>"; lives for ever)
-- ARGV  1 fencing token, in decimal without leading zeros
--       2 id of this claim, so that a copy sent again after a lost reply is no second claim
--
-- Returns  nil: claimed
--          the stored token: it is as large, or larger

local stored = redis.call('GET', KEYS[1])
if stored then
  if stored == ARGV[1] .. '/' .. ARGV[2] then
    return false
  end
  local token = string.match(stored, '^([1-9]%d*)/')
  if not token then
    return redis.error_reply('ERR the fence key holds something that is not a fence')
  end
  -- As text: above 2^53 numbers of Lua are not exact.
  if #token > #ARGV[1] or (#token == #ARGV[1] and token >= ARGV[1]) then
    return token
  end
end
redis.call('SET', KEYS[1], ARGV[1] .. '/' .. ARGV[2])
return false
