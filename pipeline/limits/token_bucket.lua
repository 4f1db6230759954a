-- Token bucket as one number (GCRA, generic cell rate algorithm): `full_at` is the time at which the
-- bucket is full again. A cost is the time in which the bucket refills by that amount; the tolerance
-- is the burst, also in seconds. State: full_at, token_full_at (absent for a new bucket).

-- A new bucket is empty except for the first call. A cost above the tolerance waits for a full
-- bucket and leaves a debt, so that no call is too large to start.
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

-- After a pause the bucket is empty: calls start at the steady pace.
local function emptied(full_at, tolerance, at)
  return math.max(full_at or 0, at + tolerance)
end
