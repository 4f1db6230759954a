-- The steps of a sync within one scope: record the report, reserve slots, save.

local BACKOFF_BASE_S, BACKOFF_MAX_S, RETRY_AFTER_MAX_S = 1, 60, 300
local BACKOFF_MEMORY_S = 10
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

local function record(request, process, version, now)
  learn(request.usage.ok, request.usage.congested, request.usage.latency_sum_s, now)
  hold(process, request.held, now, request.lease_s)
  redis.call('ZREMRANGEBYSCORE', FREE, '-inf', '(' .. exactly(now))
  -- Slots and estimates under other limits do not count under these.
  if version == pace.version then
    owe(request.usage.tokens_owed * pace.token_interval)
    local rated = pace.request_interval > 0 or pace.token_interval > 0
    for _, returned in ipairs(request.returned) do
      if rated and returned.at >= math.max(now, state.pause_until) then
        state.returned = state.returned + 1
        redis.call('ZADD', FREE, exactly(returned.at), returned.tokens .. ':' .. state.returned)
      end
    end
  end
end

local function cost_of(tokens, cap)
  local by_cap = cap > 0 and pace.horizon / cap or 0
  return math.max(pace.request_interval, tokens * pace.token_interval, by_cap)
end

local function bucket_slot(tokens, now)
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

local function next_slot(tokens, now)
  local first = redis.call('ZRANGE', FREE, 0, 0, 'WITHSCORES')
  if first[1] then
    local reserved = tonumber(string.match(first[1], '^%d+'))
    if tokens <= reserved then
      return tonumber(first[2]), 'requests', {first[1], reserved}
    end
  end
  return bucket_slot(tokens, now)
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

local function read_demands(request, process)
  local demands = {}
  for i, given in ipairs(request.demands) do
    local flow = flow_of(given.run, process)
    set_waiting(flow, given.run, given.weight, given.waiting)
    local tag = tonumber(redis.call('ZSCORE', FLOWS, flow) or 0)
    demands[i] = {
      run = given.run, weight = given.weight, waiting = given.waiting,
      estimates = given.estimates, flow = flow, tag = tag, taken = 0,
    }
  end
  return demands
end

local function save_demands(demands, due)
  for _, demand in ipairs(demands) do
    local left = demand.waiting - demand.taken
    set_waiting(demand.flow, demand.run, demand.weight, left)
    if left > 0 then
      redis.call('ZADD', DUE, exactly(due), demand.flow)
    end
  end
end

local function is_limited()
  return pace.request_interval > 0 or pace.token_interval > 0 or pace.max_concurrency > 0
    or pace.adaptive == 1
end

-- The state expires a day after its last call, so an older time is not known.
local function unused(now)
  local set_at = math.max((pace.version or 0) / 1000, now - KEEP_S)
  return is_limited() and state.granted_at < set_at and math.max(0, now - set_at) or nil
end

local self = {state = state, pace = pace, clock = clock, exactly = exactly}
self.is_limited, self.unused, self.back_off = is_limited, unused, back_off
self.next_slot, self.bucket_slot = next_slot, bucket_slot

function self.begin(request, process, version, now)
  self.process = process
  correct_clock(now)
  state.calls = state.calls + 1
  reclaim_expired(now)
  drop_silent(now)
  record(request, process, version, now)
  self.demands, self.cap = read_demands(request, process), cap_in_force()
end

function self.refusal(index, slot, limit, granted, now)
  return refusal(self.demands[index], slot, limit, self.cap, granted, now)
end

function self.next_look(index, tokens, reason, slot_in)
  return next_look(self.demands[index], reason, slot_in, cost_of(tokens, self.cap), self.cap)
end

function self.take(index, slot, free, tokens)
  local demand = self.demands[index]
  take_slot(slot, free, tokens)
  demand.tag = charge(demand.flow, demand.run, demand.tag, cost_of(tokens, self.cap))
  demand.taken = demand.taken + 1
end

function self.close(request, granted, retry_in, now)
  hold(self.process, request.held + granted, now, request.lease_s)
  save_demands(self.demands, now + 2 * retry_in + SILENT_S)
  redis.call('ZREMRANGEBYSCORE', IDLE, '-inf', exactly(state.virtual))
  state.granted = state.granted + granted
  if granted > 0 then
    state.granted_at = now
  end
  save_state()
end

return self
end
