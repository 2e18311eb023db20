package stmt

// WakeOther wakes a worker, unless another one was woken before that looks for more: that one comes. This one
// no longer does so alone.
const WakeOther = `
with alone as (update onceq.wakes set looks = 0 where worker = $3::bigint and queue = $1::text and looks > 0 returning 1)
select onceq.wake($1::text, 1, $2::bigint, true) from (select count(*) from alone) a`
