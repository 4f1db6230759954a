-- One ask of one process, mirrored by memory.py: book what ended, then reserve slots.
-- KEYS are those of the model's book, then those of its endpoint's. ARGV[1] is the ask as JSON
-- (redis_ledger.py), ARGV[2] the horizon where no limits are set, ARGV[3] the model.

local BOOK_KEYS = 10
local CONTENDED_S = 2

local function keys_from(first)
  local keys = {}
  for i = 1, BOOK_KEYS do
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

-- A slot that was handed back is taken at its own time or not at all.
local function find_slots(books, tokens, now)
  local at, differs, is_free = now, false, false
  for i, book in ipairs(books) do
    book.slot, book.limit, book.free = book.next_slot(tokens, now)
    differs = differs or i > 1 and book.slot ~= books[1].slot
    is_free = is_free or book.free ~= nil
  end
  for _, book in ipairs(books) do
    if differs and is_free then
      book.slot, book.limit, book.free = book.bucket_slot(tokens, now)
    end
    at = math.max(at, book.slot)
  end
  return at
end

local function grant(books, now)
  local grants, demands = {}, books[1].demands
  while true do
    local index = least(demands)
    if not index then
      return grants, '', 0, books[1]
    end
    local tokens = demands[index].estimates[demands[index].taken + 1]
    local at = find_slots(books, tokens, now)
    for _, book in ipairs(books) do
      local reason = book.refusal(index, book.slot, book.limit, #grants, now)
      if reason then
        return grants, reason, book.next_look(index, tokens, reason, book.slot - now), book
      end
    end
    for _, book in ipairs(books) do
      book.take(index, at, book.free, tokens)
    end
    grants[#grants + 1] = {index - 1, at - now, tokens}
  end
end

local ask = cjson.decode(ARGV[1])
local own, wide = open_book(keys_from(1)), nil
local now = own.clock()
local books = {own}
own.begin(ask, ask.process, ask.version, now)
if ask.backoff then
  own.back_off(ask.backoff, now)
end
if KEYS[BOOK_KEYS + 2] and redis.call('EXISTS', KEYS[BOOK_KEYS + 2]) == 1 then
  wide = open_book(keys_from(BOOK_KEYS + 1))
  if wide.is_limited() then
    -- In the endpoint's book each of its models counts as a process.
    wide.begin(ask, ask.process .. '|' .. ARGV[3], ask.wide_version, now)
    books[2] = wide
  end
end
for _, book in ipairs(books) do
  book.fix_cap()
end
local grants, reason, retry_in, by = grant(books, now)
for _, book in ipairs(books) do
  book.close(ask, #grants, retry_in, now)
end
local wide_version = wide and wide.pace.version or 0
return cjson.encode({
  now = own.exactly(now),
  version = own.pace.version,
  settings = ask.version ~= own.pace.version and own.pace.settings or nil,
  wide_version = wide_version,
  wide_settings = wide and ask.wide_version ~= wide_version and wide.pace.settings or nil,
  is_wide = by == wide,
  grants = grants,
  retry_in = retry_in,
  reason = reason,
  pause = math.max(0, own.state.pause_until - now),
  waiting = by.state.waiting,
  in_flight = by.state.in_flight,
  cap = by.cap,
  contended = now - by.state.contended_at < CONTENDED_S,
  granted = own.state.granted,
  calls = own.state.calls,
  unused = own.unused(now),
})
