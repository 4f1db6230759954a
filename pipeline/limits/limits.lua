-- Puts limits in force. KEYS: state, limits and free slots of one endpoint and model.
-- ARGV: 'set', or 'seed' to keep existing limits; then field, value, field, value, ...

if ARGV[1] == 'seed' and redis.call('EXISTS', KEYS[2]) == 1 then
  return 0
end
local time = redis.call('TIME')
local version = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local before = tonumber(redis.call('HGET', KEYS[2], 'version') or 0)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[2], 'version', string.format('%.0f', math.max(version, before + 1)))
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
redis.call('HDEL', KEYS[1], 'full_at', 'token_full_at', 'cap', 'steady')
return 1
