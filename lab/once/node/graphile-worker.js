// graphile-worker with job keys and, for one customer's jobs, named queues.

import { run, runMigrations, Logger } from 'graphile-worker'
import { serve, pool, url, insertRow, noRate, Missing } from './serve.js'

const logger = new Logger(() => () => {})

serve({
  setup: () => runMigrations({ connectionString: url, logger }),
  async enqueue(jobs, tx) {
    const specs = jobs.map((j) => {
      if (j.queue) throw new Missing('it has no queues among which a worker chooses')
      if (j.limit) throw new Missing('it has no limit over several processes')
      if (j.rate) throw new Missing(noRate)
      if (j.group) throw new Missing('it has no jobs that wait for others')
      return {
        identifier: j.kind || 'work',
        payload: { n: j.n },
        ...(j.lane && { queue_name: j.lane }),
        ...(j.key && { job_key: j.key }),
        ...(j.attempts && { max_attempts: j.attempts }),
        ...(j.delay && { run_at: new Date(Date.now() + j.delay) }),
      }
    })
    const { rows } = await (tx ?? pool).query(
      'select * from graphile_worker.add_jobs(array(select json_populate_recordset(null::graphile_worker.job_spec, $1::json)))',
      [JSON.stringify(specs)],
    )
    return rows.map((row) => ({ id: row.id, duplicate: row.revision > 0 }))
  },
  async work(crew, handle) {
    if (crew.every) throw new Missing('not played: its schedules are by the minute, those of this story by the second')
    const task = (payload, { job }) =>
      handle({
        n: payload.n,
        attempt: job.attempts,
        write: (n) => pool.query(insertRow, [n]),
        call: (what, fn) => fn(`graphile-${job.id}-${what}`),
      })
    const runner = await run({
      connectionString: url,
      concurrency: crew.at_once,
      pollInterval: 200,
      minResetLockedInterval: 500, // how often a worker looks for locks that are too old
      maxResetLockedInterval: 1000,
      noHandleSignals: true,
      logger,
      taskList: Object.fromEntries(crew.kinds.map((kind) => [kind, task])),
    })
    return () => Promise.race([runner.stop(), new Promise((resolve) => setTimeout(resolve, crew.stop_within))])
  },
  async left() {
    const { rows } = await pool.query('select count(*)::int as n from graphile_worker._private_jobs where attempts < max_attempts or locked_at is not null')
    return rows[0].n
  },
  // A lock holds for four hours.
  async silence() {
    await pool.query(`update graphile_worker._private_jobs set locked_at = locked_at - interval '5 hours' where locked_at is not null`)
    await pool.query(`update graphile_worker._private_job_queues set locked_at = locked_at - interval '5 hours' where locked_at is not null`)
  },
  age: async () => {}, // what is finished is gone
  async cancel(id) {
    const { rowCount } = await pool.query('select graphile_worker.complete_jobs(array[$1::bigint])', [id])
    if (rowCount === 0) throw new Error('not cancelled: it is locked')
  },
})
