-- GCRA, mirrored by token_bucket.py: `full_at` is when all that was taken will have been earned.
-- Costs are seconds of earning. State fields: full_at, token_full_at (absent for a new bucket).

local function earliest(full_at, cost, tolerance, now)
  if not full_at then
    return now
  end
  return math.max(now, full_at + cost - math.max(tolerance, cost))
end

local function take(full_at, cost, tolerance, at)
  if not full_at then
    return at + math.max(tolerance, cost)
  end
  return math.max(full_at, at) + cost
end

local function emptied(full_at, tolerance, at)
  return math.max(full_at or 0, at + tolerance)
end
