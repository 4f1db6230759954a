-- One sync of one process: record its report, then reserve slots for its waiting callers.
-- KEYS: those of the model's scope, then those of its endpoint's. ARGV: the request as JSON
-- (sync_messages.py), the horizon where no limits are set, the model.

local SCOPE_KEYS = 10
local CONTENDED_S = 2

local function keys_from(first)
  local keys = {}
  for i = 1, SCOPE_KEYS do
    keys[i] = KEYS[first + i - 1]
  end
  return keys
end

local function least(demands)
  local best
  for i, demand in ipairs(demands) do
    if demand.taken < #demand.estimates and (not best or demand.tag < demands[best].tag) then
      best = i
    end
  end
  return best
end

-- A slot that was given back is used at its own time or not at all.
local function find_slots(scopes, tokens, now)
  local at, differs, is_free = now, false, false
  for i, scope in ipairs(scopes) do
    scope.slot, scope.limit, scope.free = scope.next_slot(tokens, now)
    differs = differs or i > 1 and scope.slot ~= scopes[1].slot
    is_free = is_free or scope.free ~= nil
  end
  for _, scope in ipairs(scopes) do
    if differs and is_free then
      scope.slot, scope.limit, scope.free = scope.bucket_slot(tokens, now)
    end
    at = math.max(at, scope.slot)
  end
  return at
end

local function grant(scopes, now)
  local grants, demands = {}, scopes[1].demands
  while true do
    local index = least(demands)
    if not index then
      return grants, '', 0, scopes[1]
    end
    local tokens = demands[index].estimates[demands[index].taken + 1]
    local at = find_slots(scopes, tokens, now)
    for _, scope in ipairs(scopes) do
      local reason = scope.refusal(index, scope.slot, scope.limit, #grants, now)
      if reason then
        return grants, reason, scope.next_look(index, tokens, reason, scope.slot - now), scope
      end
    end
    for _, scope in ipairs(scopes) do
      scope.take(index, at, scope.free, tokens)
    end
    grants[#grants + 1] = {index - 1, at - now, tokens}
  end
end

local request = cjson.decode(ARGV[1])
local own, whole = open_scope(keys_from(1)), nil
local now = own.clock()
local scopes = {own}
own.begin(request, request.process, request.version, now)
if request.backoff_s ~= cjson.null then
  own.back_off(request.backoff_s, now)
end
if KEYS[SCOPE_KEYS + 2] and redis.call('EXISTS', KEYS[SCOPE_KEYS + 2]) == 1 then
  whole = open_scope(keys_from(SCOPE_KEYS + 1))
  if whole.is_limited() then
    -- In the endpoint's scope, each model of a process counts as a process.
    whole.begin(request, request.process .. '|' .. ARGV[3], request.endpoint_version, now)
    scopes[2] = whole
  end
end
local grants, reason, retry_in, by = grant(scopes, now)
for _, scope in ipairs(scopes) do
  scope.close(request, #grants, retry_in, now)
end
local endpoint_version = whole and whole.pace.version or 0
return cjson.encode({
  now = own.exactly(now),
  version = own.pace.version,
  settings = request.version ~= own.pace.version and own.pace.settings or nil,
  endpoint_version = endpoint_version,
  endpoint_settings = whole and request.endpoint_version ~= endpoint_version and whole.pace.settings or nil,
  grants = grants,
  retry_in_s = retry_in,
  reason = reason,
  pause_s = math.max(0, own.state.pause_until - now),
  waiting = by.state.waiting,
  in_flight = by.state.in_flight,
  cap = by.cap,
  is_contended = now - by.state.contended_at < CONTENDED_S,
  granted = own.state.granted,
  calls = own.state.calls,
  unused_s = own.unused(now),
})
