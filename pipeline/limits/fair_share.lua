-- Start-time fair queueing between flows. A flow is one run in one process; its tag is the service it
-- has had, in seconds of capacity over its weight. Only flows with waiting callers count, and none
-- may be ahead of the last of them by more than its share of the horizon.
-- FLOWS: tags of waiting flows. IDLE: tags of flows that stopped waiting while ahead. RUNS: weight and
-- number of flows per run. WAITS: waiting callers per flow. DUE: when a silent flow is dropped.
-- State: virtual (time), waiting.

local function flow_of(run, process)
  return run .. '\n' .. process
end

local function run_of(flow)
  return string.match(flow, '^(.*)\n[^\n]*$')
end

local function read_run(run)
  local text = redis.call('HGET', RUNS, run)
  if not text then
    return nil, 0
  end
  local weight, flows = string.match(text, '^(%S+) (%S+)$')
  return tonumber(weight), tonumber(flows)
end

local function write_run(run, weight, flows)
  if flows > 0 then
    redis.call('HSET', RUNS, run, exactly(weight) .. ' ' .. flows)
  else
    redis.call('HDEL', RUNS, run)
  end
end

local function advance()
  local first = redis.call('ZRANGE', FLOWS, 0, 0, 'WITHSCORES')
  if first[2] then
    state.virtual = math.max(state.virtual, tonumber(first[2]))
  end
end

local function join(flow, run, weight)
  advance()
  local tag = math.max(state.virtual, tonumber(redis.call('ZSCORE', IDLE, flow) or 0))
  redis.call('ZREM', IDLE, flow)
  redis.call('ZADD', FLOWS, exactly(tag), flow)
  local known, flows = read_run(run)
  write_run(run, known or weight, flows + 1)
end

local function leave(flow)
  state.waiting = math.max(0, state.waiting - tonumber(redis.call('HGET', WAITS, flow) or 0))
  redis.call('HDEL', WAITS, flow)
  redis.call('ZREM', DUE, flow)
  redis.call('ZADD', IDLE, redis.call('ZSCORE', FLOWS, flow) or exactly(state.virtual), flow)
  redis.call('ZREM', FLOWS, flow)
  local run = run_of(flow)
  local weight, flows = read_run(run)
  write_run(run, weight, flows - 1)
end

local function set_waiting(flow, run, weight, waiting)
  local before = tonumber(redis.call('HGET', WAITS, flow) or 0)
  if waiting > 0 then
    if before == 0 then
      join(flow, run, weight)
    end
    local known, flows = read_run(run)
    if known ~= weight then
      write_run(run, weight, flows)
    end
    redis.call('HSET', WAITS, flow, waiting)
    state.waiting = state.waiting + waiting - before
  elseif before > 0 then
    leave(flow)
  end
end

local function drop_silent(now)
  for _, flow in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', exactly(now), 'LIMIT', 0, 50)) do
    leave(flow)
  end
end

local function lead(horizon)
  local weights = 0
  for _, text in ipairs(redis.call('HVALS', RUNS)) do
    weights = weights + tonumber(string.match(text, '^%S+'))
  end
  return horizon / weights
end

local function charge(flow, run, tag, cost)
  local weight, flows = read_run(run)
  tag = tag + cost * flows / weight
  redis.call('ZADD', FLOWS, exactly(tag), flow)
  return tag
end
