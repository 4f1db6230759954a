-- One ask of one process, mirrored by memory.py: book what ended, then reserve slots.
-- ARGV[1] is the ask as JSON (redis_ledger.py), ARGV[2] the horizon where no limits are set.

local BACKOFF_BASE_S, BACKOFF_MAX_S, RETRY_AFTER_MAX_S = 1, 60, 300
local BACKOFF_MEMORY_S = 10
local CONTENDED_S = 2
local RETRY_MIN_S, RETRY_MAX_S = 0.02, 1
local SILENT_S = 0.4

local function back_off(asked, now)
  local until_
  if asked > 0 then
    until_ = now + math.min(asked, RETRY_AFTER_MAX_S)
  elseif now < state.pause_until then
    return
  else
    local again = state.pause_until > 0 and now - state.pause_until < BACKOFF_MEMORY_S
    state.backoffs = again and state.backoffs + 1 or 0
    until_ = now + math.min(BACKOFF_BASE_S * 2 ^ state.backoffs, BACKOFF_MAX_S)
  end
  if until_ > state.pause_until then
    state.pause_until = until_
    redis.call('DEL', FREE)
    state.full_at = emptied(state.full_at, pace.request_tolerance - pace.request_interval, until_)
    state.token_full_at = emptied(state.token_full_at, pace.token_tolerance, until_)
  end
end

local function owe(cost)
  if state.token_full_at then
    state.token_full_at = state.token_full_at + cost
  end
end

local function book(ask, now)
  learn(ask.ok, ask.congested, ask.latency_sum, now)
  hold(ask.process, ask.held, now, ask.lease)
  redis.call('ZREMRANGEBYSCORE', FREE, '-inf', '(' .. exactly(now))
  -- What was reserved or estimated under other limits means nothing under these.
  if ask.version == pace.version then
    owe(ask.owed * pace.token_interval)
    local rated = pace.request_interval > 0 or pace.token_interval > 0
    for _, returned in ipairs(ask.returned) do
      if rated and returned[1] >= math.max(now, state.pause_until) then
        state.returned = state.returned + 1
        redis.call('ZADD', FREE, exactly(returned[1]), returned[2] .. ':' .. state.returned)
      end
    end
  end
  if ask.backoff then
    back_off(ask.backoff, now)
  end
end

local function cost_of(tokens, cap)
  local by_cap = cap > 0 and pace.horizon / cap or 0
  return math.max(pace.request_interval, tokens * pace.token_interval, by_cap)
end

local function next_slot(tokens, now)
  local first = redis.call('ZRANGE', FREE, 0, 0, 'WITHSCORES')
  if first[1] then
    local reserved = tonumber(string.match(first[1], '^%d+'))
    if tokens <= reserved then
      return tonumber(first[2]), 'requests', {first[1], reserved}
    end
  end
  local by_request, by_tokens = now, now
  if pace.request_interval > 0 then
    by_request = earliest(state.full_at, pace.request_interval, pace.request_tolerance, now)
  end
  if pace.token_interval > 0 then
    by_tokens = earliest(state.token_full_at, tokens * pace.token_interval, pace.token_tolerance, now)
  end
  local slot = math.max(by_request, by_tokens, state.pause_until)
  return slot, by_tokens > by_request and 'tokens' or 'requests', nil
end

local function refusal(demand, slot, limit, cap, granted, now)
  if state.pause_until > now + pace.horizon then
    return 'backoff'
  end
  if cap > 0 and state.in_flight + granted >= cap then
    state.contended_at = now
    return 'concurrency'
  end
  advance()
  if demand.tag - state.virtual > lead(pace.horizon) + 1e-9 then
    return 'share'
  end
  return slot > now + pace.horizon and limit or nil
end

local function next_look(demand, reason, slot_in, cost, cap)
  local rank = redis.call('ZRANK', FLOWS, demand.flow)
  if reason == 'concurrency' then
    local latency = state.latency > 0 and state.latency or 0.1
    return math.min(math.max((rank + 1) * latency / cap, RETRY_MIN_S), RETRY_MAX_S)
  end
  return math.max(slot_in - pace.horizon + rank * cost, pace.horizon / 2)
end

local function take_slot(slot, free, tokens)
  if free then
    redis.call('ZREM', FREE, free[1])
    owe((tokens - free[2]) * pace.token_interval)
    return
  end
  if pace.request_interval > 0 then
    state.full_at = take(state.full_at, pace.request_interval, pace.request_tolerance, slot)
  end
  if pace.token_interval > 0 then
    state.token_full_at = take(state.token_full_at, tokens * pace.token_interval, pace.token_tolerance, slot)
  end
end

local function least(demands)
  local best
  for _, demand in ipairs(demands) do
    if demand.taken < #demand.estimates and (not best or demand.tag < best.tag) then
      best = demand
    end
  end
  return best
end

local function grant(demands, cap, now)
  local grants = {}
  while true do
    local demand = least(demands)
    if not demand then
      return grants, '', 0
    end
    local tokens = demand.estimates[demand.taken + 1]
    local cost = cost_of(tokens, cap)
    local slot, limit, free = next_slot(tokens, now)
    local reason = refusal(demand, slot, limit, cap, #grants, now)
    if reason then
      return grants, reason, next_look(demand, reason, slot - now, cost, cap)
    end
    take_slot(slot, free, tokens)
    demand.tag = charge(demand.flow, demand.run, demand.tag, cost)
    demand.taken = demand.taken + 1
    grants[#grants + 1] = {demand.index, slot - now, tokens}
  end
end

local function enter(ask)
  local demands = {}
  for i, given in ipairs(ask.demands) do
    local run, weight, waiting = given[1], given[2], given[3]
    local flow = flow_of(run, ask.process)
    tell(flow, run, weight, waiting)
    local tag = tonumber(redis.call('ZSCORE', FLOWS, flow) or 0)
    demands[i] = {
      index = i - 1, run = run, weight = weight, waiting = waiting,
      estimates = given[4], flow = flow, tag = tag, taken = 0,
    }
  end
  return demands
end

local function settle(demands, due)
  for _, demand in ipairs(demands) do
    local left = demand.waiting - demand.taken
    tell(demand.flow, demand.run, demand.weight, left)
    if left > 0 then
      redis.call('ZADD', DUE, exactly(due), demand.flow)
    end
  end
end

local ask = cjson.decode(ARGV[1])
local now = clock()
mend_clock(now)
state.calls = state.calls + 1
reclaim_expired(now)
drop_silent(now)
book(ask, now)
local demands = enter(ask)
local cap = cap_in_force()
local grants, reason, retry_in = grant(demands, cap, now)
hold(ask.process, ask.held + #grants, now, ask.lease)
settle(demands, now + 2 * retry_in + SILENT_S)
redis.call('ZREMRANGEBYSCORE', IDLE, '-inf', exactly(state.virtual))
state.granted = state.granted + #grants
save_state()
return cjson.encode({
  now = exactly(now),
  version = pace.version,
  settings = ask.version ~= pace.version and pace.settings or nil,
  grants = grants,
  retry_in = retry_in,
  reason = reason,
  pause = math.max(0, state.pause_until - now),
  waiting = state.waiting,
  in_flight = state.in_flight,
  cap = cap,
  contended = now - state.contended_at < CONTENDED_S,
  granted = state.granted,
  calls = state.calls,
})
