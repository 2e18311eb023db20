package stmt

// TakeSlots calls a function of the schema, whose comment says how it gives new slots to leased jobs.
const TakeSlots = `select f.starts, f.taken, f.waited, f.back, f.ahead from onceq.take_slots($1::text, $2::bigint[], $3::int[], $4::bigint[]) f`
