-- Cap on calls in flight, fixed or adaptive (AIMD), and the units that each process holds.
-- The adaptive cap grows by one per round of calls while it is used up (doubles per round until its
-- first decrease). It shrinks on 429s, timeouts and grown latency, once per round.
-- State: cap latency usual round_sum round_calls round_ends_at calm_at steady in_flight.

local CAP_START, CAP_MAX = 64, 10000
local USED_UP = 0.8
local ON_CONGESTION, ON_LATENCY = 0.7, 0.9
local LATENCY_GROWTH = 2
local ROUND_MIN_S, ROUND_MIN_CALLS = 0.1, 8

local function cap_in_force()
  local most = pace.max_concurrency
  if pace.adaptive == 0 then
    return most
  end
  if state.cap == 0 then
    state.cap = most > 0 and most or CAP_START
  end
  state.cap = math.min(state.cap, most > 0 and most or CAP_MAX)
  return math.floor(state.cap)
end

local function round_s()
  return math.max(state.latency, ROUND_MIN_S)
end

local function end_round(now)
  if now < state.round_ends_at or state.round_calls < ROUND_MIN_CALLS then
    return false
  end
  local mean = state.round_sum / state.round_calls
  local slowed = state.usual > 0 and mean > LATENCY_GROWTH * state.usual
  local weight = state.usual == 0 and 1 or mean < state.usual and 0.5 or 0.05
  state.usual = state.usual + (mean - state.usual) * weight
  state.round_sum, state.round_calls = 0, 0
  state.round_ends_at = now + round_s()
  return slowed
end

local function shrink(factor, now)
  if now < state.calm_at then
    return
  end
  state.cap = math.max(1, state.cap * factor)
  state.steady = 1
  state.calm_at = now + round_s()
end

local function learn(ok, congested, latency_sum, now)
  if ok > 0 then
    local mean = latency_sum / ok
    state.latency = state.latency + (mean - state.latency) * (state.latency > 0 and 0.2 or 1)
    state.round_sum = state.round_sum + latency_sum
    state.round_calls = state.round_calls + ok
  end
  if pace.adaptive == 0 then
    return
  end
  cap_in_force()
  local slowed = end_round(now)
  if congested > 0 or slowed then
    shrink(congested > 0 and ON_CONGESTION or ON_LATENCY, now)
  elseif ok > 0 and now >= state.calm_at and state.in_flight >= USED_UP * state.cap then
    state.cap = state.cap + (state.steady == 1 and ok / state.cap or ok)
  end
  cap_in_force()
end

-- Units are absolute per process, so the next sync repairs a lost reply or a lost count.
local function hold(process, held, now, lease)
  local before = tonumber(redis.call('HGET', HELD, process) or 0)
  state.in_flight = state.in_flight + held - before
  if held > 0 then
    redis.call('HSET', HELD, process, held)
    redis.call('ZADD', LEASES, exactly(now + lease), process)
  elseif before > 0 then
    redis.call('HDEL', HELD, process)
    redis.call('ZREM', LEASES, process)
  end
end

local function reclaim_expired(now)
  for _, process in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', exactly(now), 'LIMIT', 0, 50)) do
    hold(process, 0, now, 0)
  end
end
