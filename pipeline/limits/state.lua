-- Shared by all parts of the script: keys, the server's clock, the limits, the stored numbers.
-- The parts are joined in this order: state, token_bucket, concurrency, fair_share, scope, grant.
-- A scope is a set of limits with its counters: a model's, or those of its whole endpoint. This file
-- opens the function `open_scope` and scope.lua ends it, because one call may pass two scopes.
local function open_scope(KEYS)

local STATE, LIMITS, FLOWS, IDLE, DUE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local WAITS, RUNS, LEASES, HELD, FREE = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

-- Redis converts numbers to text with 14 digits, which would cut times to a tenth of a millisecond.
local function exactly(number)
  return string.format('%.17g', number)
end

local function read_hash(key)
  local fields, flat = {}, redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    fields[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1]
  end
  return fields
end

-- Absent numbers read as 0, except for the two buckets: there, absent means new.
local state = setmetatable(read_hash(STATE), {
  __index = function(_, name)
    if name ~= 'full_at' and name ~= 'token_full_at' then
      return 0
    end
  end,
})
local pace = setmetatable(read_hash(LIMITS), {__index = function() return 0 end})
if pace.horizon == 0 then
  pace.horizon = tonumber(ARGV[2])
end

-- If the server's clock was set back, calls must not wait until it has caught up.
local function correct_clock(now)
  local back = state.now - now
  if back > 1 then
    for _, name in ipairs({'full_at', 'token_full_at', 'pause_until', 'calm_at', 'round_ends_at', 'contended_at'}) do
      if state[name] then
        state[name] = state[name] - back
      end
    end
  end
  state.now = now
end

-- A day after the last call of an endpoint, only its limits remain in Redis.
local KEEP_S, KEEP_AGAIN_S = 86400, 60

local function save_state()
  local due = state.now > state.kept_at + KEEP_AGAIN_S
  state.kept_at = due and state.now or state.kept_at
  local flat = {}
  for name, value in pairs(state) do
    flat[#flat + 1] = name
    flat[#flat + 1] = exactly(value)
  end
  redis.call('HSET', STATE, unpack(flat))
  if due then
    for i = 1, #KEYS do
      if KEYS[i] ~= LIMITS then
        redis.call('EXPIRE', KEYS[i], KEEP_S)
      end
    end
  end
end
